"""Tests of the layer rule and of the budgets for sizes, and of their checkers on bad snippets.

Each checker takes one parsed file and returns complaints; the tests at the end run them over the repository. To allow
an exception, add it to one of the tables with a reason: reviewers look there.
"""

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.sources import PACKAGE, Definition, Source, around, assert_none, bound_names, functions, imports, ours
from tests.structure import code_lines, dotted

# Lower rows first. A unit may import itself and units of lower rows; units of one row never import each other.
# A dotted unit ("core.memory.disk") is a folder or a module; the longest match counts.
ROWS: tuple[tuple[str, ...], ...] = (
    ("core.base",),
    ("plan",),
    ("core.comm",),
    ("core.mesh",),
    ("core.memory.trace", "core.memory.disk", "core.deferred"),
    ("core.parallel",),
    ("core.memory",),
    ("core.optim",),
    ("core.shards",),
    ("core.checks",),
    ("core.grads",),
    ("core.update",),
    ("core.engine",),
    ("core.checkpoint",),
    ("session",),
    ("compat", "metrics"),
    ("late_session",),  # a session that is built on demand
    ("shardformer",),  # configurations and policies, which plugins of the Booster accept
    ("booster", "zero", "deepspeed", "nn"),
    ("strategies",),  # Lightning's strategies for both of its packages; they translate as the front-ends do
    ("lightning", "pytorch_lightning", "fabric", "lightning_fabric", "huggingface", "pytorch"),
    ("lightning_colossalai",),  # selects one of Lightning's packages
    ("colossalai",),  # a table of names and thin translations
    ("cli",),
)
# Outside of the order: `testing` may import everything, and nothing may import it; two files start the package.
FREE = {"testing", "", "__main__", "core"}

# Front-ends translate into a Plan and call a Session: the last rows, except for optimizers and schedulers.
FRONT_ENDS = {unit for row in ROWS[ROWS.index(("booster", "zero", "deepspeed", "nn")) :] for unit in row} - {"nn"}
BELOW_SESSION = {f"core.{name}" for name in ("engine", "update", "grads", "checks", "shards", "memory.disk")}

MAX_FILE, MAX_CODE, MAX_FUNCTION, MAX_PARAMETERS = 900, 600, 60, 8
MAX_ATTRIBUTES = 20
# Classes whose methods set more, and how many; entries and numbers may only decrease.
MANY_ATTRIBUTES = {"core.grads.chunk_grads:ChunkGrads": 26, "core.grads.backward_passes:BackwardPasses": 21}
MANY_ATTRIBUTES |= {"core.grads.reducer:Reducer": 31, "core.shards.chunk:Chunk": 24, "core.shards.gather:ChunkPool": 38}
MANY_ATTRIBUTES["deepspeed.engine:DeepSpeedEngine"] = 24
# A module that only one other module may import, since the engine gives access to everything.
PRIVATE = {f"{PACKAGE}.core.engine.engine": f"{PACKAGE}.session"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
ENVIRONMENT_READERS = (f"{PACKAGE}.core.mesh.launch", f"{PACKAGE}.cli.")
# Functions of torch.cuda without a device; all others are called by the package that names the device.
OF_NO_DEVICE = {"is_available", "is_initialized", "device_count", "manual_seed_all"}
TYPES = {"Stream", "Event"}
IMPLICIT_DEVICE = {"record_stream", "get_device_module"}
# Arguments of tensor operations for page-locked memory and asynchronous copies.
SEAM_ARGUMENTS = {"non_blocking", "pin_memory"}
OPERATIONS = {"copy_", "to", "empty", "zeros", "empty_like", "zeros_like", "tensor", "empty_strided"}
EXPLAINED_ERRORS = {"ValueError", "RuntimeError", "NotImplementedError", "TypeError"}

# Published signatures, reproduced argument by argument.
PUBLISHED_SIGNATURES = {
    "colossalai.gemini_models": ("GeminiDDP.__init__", "GeminiOptimizer.__init__"),
    "colossalai.low_level_optimizer": ("LowLevelZeroOptimizer.__init__", "zero_optim_wrapper"),
    "core.optim.adam": ("CPUAdam.__init__", "HybridAdam.__init__", "FusedAdam.__init__"),
    "core.optim.lamb": ("FusedLAMB.__init__",),
    "deepspeed.collectives": ("all_to_all_single", "init_distributed"),
    "deepspeed.optimizers": ("DeepSpeedCPUAdam.__init__", "FusedAdam.__init__", "FusedLamb.__init__"),
    "deepspeed.initialization": ("initialize",),
    "deepspeed.flops_profiler": ("get_model_profile",),
    "deepspeed.schedules": ("OneCycle.__init__",),
    "deepspeed.zero": ("Init.__init__",),
    "nn.lr_scheduler": ("OneCycleLR.__init__",),
    "pytorch.plans": ("plan_of_ddp", "plan_of_fsdp", "plan_of_fully_shard"),
    "strategies.colossalai": ("ColossalAI.__init__", "FabricColossalAI.__init__"),
    "strategies.deepspeed": ("DeepSpeed.__init__", "FabricDeepSpeed.__init__"),
    "strategies.fully_sharded": ("FabricFullySharded.__init__", "FullyShardedStrategy.__init__"),
    "zero.init_ctx": ("ZeroInitContext.__init__",),
    "zero.sharded_model.sharded_model_v2": ("ShardedModelV2.__init__",),
    "zero.sharded_optim": ("ShardedOptimizerV2.__init__",),
}
# Published module paths.
PUBLISHED_MODULES = {f"{PACKAGE}.zero.sharded_model.utils"}

SMALL = 100
# Small modules that one module of their folder imports: programs, subcommands and published paths.
SMALL_MODULES = {f"{PACKAGE}.cli.{name}" for name in ("run_as_library", "end_with_parent", "schedule")}
SMALL_MODULES |= {f"{PACKAGE}.deepspeed.hardware"}


Checker = Callable[[Source], list[str]]


def unit_and_row(module: str) -> tuple[str, int | None]:
    """Return the unit of a module (the longest match) and its row, or ``None`` for modules outside of the order."""
    path = module.removeprefix(PACKAGE).lstrip(".")
    units = {unit: row for row, names in enumerate(ROWS) for unit in names}
    matches = [unit for unit in units if path == unit or path.startswith(unit + ".")]
    if matches:
        unit = max(matches, key=len)
        return unit, units[unit]
    return path.split(".")[0], None


def check_layers(source: Source) -> list[str]:
    """Check that imports go to lower rows only, and that each module has a row."""
    unit, row = unit_and_row(source.name)
    if row is None:
        return [] if unit in FREE else [f"{source.name}: {unit!r} is in no row of ROWS; give it one"]
    complaints = []
    for line, target in imports(source):
        other, other_row = unit_and_row(target)
        if other == "testing":
            complaints.append(f"{source.name}:{line} imports {target}: only tests may import testing")
        elif target != PACKAGE and other_row is None and other not in FREE:
            complaints.append(f"{source.name}:{line} imports {target}: {other!r} is in no row of ROWS")
        elif other_row is not None and other != unit and other_row >= row:
            complaints.append(f"{source.name}:{line} imports {target}: {other!r} is not below {unit!r}")
        if PRIVATE.get(target, source.name) != source.name:
            complaints.append(f"{source.name}:{line} imports {target}: only {PRIVATE[target]} may")
    return complaints


def check_front_ends(source: Source) -> list[str]:
    """Check that a front-end only translates arguments and calls a Session: it imports nothing below ``session``."""
    unit, _ = unit_and_row(source.name)
    if unit not in FRONT_ENDS:
        return []
    complaints = [
        f"{source.name}:{line} imports {target}: a front-end takes it from session, or asks a Session for it"
        for line, target in imports(source)
        if unit_and_row(target)[0] in BELOW_SESSION
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "_engine":
            complaints.append(f"{source.name}:{node.lineno} reaches {ast.unparse(node)}: give Session a method for it")
    return complaints


def find_cycles(sources: list[Source], at_run_time: bool = True) -> list[str]:
    """Return import cycles between modules, found by depth-first search.

    Imports under TYPE_CHECKING are ignored ``at_run_time``.
    """
    graph = {s.name: {name for _, name in imports(s, at_run_time) if name != s.name} for s in sources}
    cycles: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            cycles.append(" -> ".join((*path[path.index(name) :], name)))
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    return cycles


def _lines(node: Definition) -> int:
    # Documentation does not count.
    first = node.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


def check_sizes(source: Source) -> list[str]:
    """Check the lines of a file and of a function, the parameters of a function, and vague names."""
    complaints = []
    length = len(source.text.splitlines())
    if length > MAX_FILE:
        complaints.append(f"{source.name}: {length} lines, the budget is {MAX_FILE}")
    elif length > MAX_CODE and (code := code_lines(source)) > MAX_CODE:
        complaints.append(f"{source.name}: {code} lines of code, the budget is {MAX_CODE}")
    if source.name.rsplit(".", 1)[-1] in VAGUE_NAMES and source.name not in PUBLISHED_MODULES:
        complaints.append(f"{source.name}: name the module after what is in it")
    for name, node in functions(source.tree):
        if (lines := _lines(node)) > MAX_FUNCTION:
            complaints.append(f"{source.name}:{node.lineno} {name} has {lines} lines, the budget is {MAX_FUNCTION}")
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in arguments)
        published = PUBLISHED_SIGNATURES.get(source.name.removeprefix(f"{PACKAGE}."), ())
        if count > MAX_PARAMETERS and name not in published:
            complaints.append(f"{source.name}:{node.lineno} {name} takes {count} parameters, at most {MAX_PARAMETERS}")
    return complaints


def many_attributes(source: Source) -> Iterator[tuple[str, int]]:
    """Yield classes whose methods set more than :data:`MAX_ATTRIBUTES` attributes of ``self``, with the number."""
    for node in (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)):
        stored = (x for x in ast.walk(node) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store))
        own = {each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self"}
        if len(own) > MAX_ATTRIBUTES:
            yield f"{source.name.removeprefix(PACKAGE + '.')}:{node.name}", len(own)


def check_attributes(source: Source) -> list[str]:
    """Check that a class has few attributes: one with many does the work of several."""
    return [f"{name} has {n} attributes" for name, n in many_attributes(source) if n > MANY_ATTRIBUTES.get(name, 0)]


def check_state(source: Source) -> list[str]:
    """Check that there is no ``global``, and that only two places read the environment."""
    complaints = []
    reads_allowed = source.name.startswith(ENVIRONMENT_READERS)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            complaints.append(f"{source.name}:{node.lineno} global {', '.join(node.names)}: pass it instead")
        is_os = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
        name = node.attr if is_os else ""
        imported = isinstance(node, ast.ImportFrom) and node.module == "os"
        names = {alias.name for alias in node.names} if imported else {name}
        if names & {"environ", "environb", "getenv", "putenv"} and not reads_allowed:
            complaints.append(f"{source.name}:{node.lineno} uses the environment: only mesh/launch.py and cli/ may")
    return complaints


def check_devices(source: Source) -> list[str]:
    """Check that streams, events, generators and the current GPU are used in one place, which names the device."""
    if source.name.startswith(f"{PACKAGE}.core.base.device"):
        return []
    complaints = []
    called = {id(node.func) for node in ast.walk(source.tree) if isinstance(node, ast.Call)}
    for node in ast.walk(source.tree):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom | ast.Import):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
            found = [base + alias.name for alias in node.names if (base + alias.name).startswith("torch.cuda")]
        elif isinstance(node, ast.Attribute):
            name, calls = dotted(node), id(node) in called
            if name.startswith(("torch.cuda.", "torch.accelerator.")):
                found = [] if node.attr in OF_NO_DEVICE or (node.attr in TYPES and not calls) else [name]
            elif node.attr in IMPLICIT_DEVICE or (node.attr in {"cuda", "is_pinned"} and calls):
                found = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OPERATIONS:
            given = {keyword.arg for keyword in node.keywords}
            found = [f"{node.func.attr}({name}=)" for name in sorted(SEAM_ARGUMENTS & given)]
        for each in found:
            complaints.append(f"{source.name}:{node.lineno} {each}: ask shardwise.core.base.device, with a device")
    return complaints


def check_docstrings(source: Source) -> list[str]:
    """Check that the module and its public functions and classes have docstrings."""
    complaints = [] if ast.get_docstring(source.tree) or not source.tree.body else [f"{source.name}: no docstring"]
    for node in source.tree.body:
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if documented and not node.name.startswith("_") and not ast.get_docstring(node):
            complaints.append(f"{source.name}:{node.lineno} {node.name} has no docstring")
    return complaints


def _shows_value(argument: ast.expr) -> bool:
    # A name, an attribute or a call is a message composed elsewhere; a literal must have a value in it.
    if isinstance(argument, ast.Name | ast.Attribute | ast.Call):
        return True
    return any(isinstance(inner, ast.FormattedValue) for inner in ast.walk(argument))


def check_raises(source: Source) -> list[str]:
    """Check that each error that a user can cause shows the offending value."""
    complaints = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        call = node.exc if isinstance(node.exc, ast.Call) else None
        raised = call.func if call else node.exc
        if not isinstance(raised, ast.Name) or raised.id not in EXPLAINED_ERRORS:
            continue
        if call is None or not call.args or not _shows_value(call.args[0]):
            complaints.append(f"{source.name}:{node.lineno} {raised.id} without the offending value: use an f-string")
    return complaints


def check_all(source: Source) -> list[str]:
    """Check that all names in ``__all__`` exist (a submodule counts, and ``__getattr__`` may make names)."""
    bound = bound_names(source.tree)
    if "__getattr__" in bound:
        return []
    complaints = []
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            for name in ast.literal_eval(node.value):
                if name not in bound and f"{source.name}.{name}" not in source.modules:
                    complaints.append(f"{source.name}:{node.lineno} __all__ lists {name!r}, which is not there")
    return complaints


PACKAGE_CHECKERS: list[Checker] = [check_layers, check_front_ends, check_sizes, check_attributes, check_state]
PACKAGE_CHECKERS += [check_devices, check_docstrings, check_raises, check_all]


def _made(module: str, every: dict[str, Source]) -> set[str]:
    """Return names that the nearest package above binds, if it makes modules below it with ``__getattr__``."""
    above = module.rpartition(".")[0]
    while above not in every and above:
        above = above.rpartition(".")[0]
    return bound_names(every[above].tree) & {"__getattr__"} if above != PACKAGE and above else set()


def missing_imports(source: Source, every: dict[str, Source]) -> Iterator[str]:
    """Yield names of this repository that ``source`` imports from a module that does not have them."""
    roots = {name.split(".")[0] for name in every}
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").split(".")[0] not in roots:
            continue
        bound = bound_names(every[node.module].tree) if node.module in every else _made(node.module, every)
        for alias in node.names:
            if alias.name not in bound and f"{node.module}.{alias.name}" not in every and "__getattr__" not in bound:
                yield f"{source.name}:{node.lineno} imports what is not there: {node.module}.{alias.name}"


def test_sources_are_found() -> None:
    assert {f"{PACKAGE}.plan.plan", f"{PACKAGE}.cli.main"} <= {source.name for source in ours()}


@pytest.mark.parametrize("checker", PACKAGE_CHECKERS, ids=lambda checker: checker.__name__)
def test_checkers_on_the_package(checker: Checker) -> None:
    assert_none(complaint for source in ours() for complaint in checker(source))


def single_users(sources: list[Source]) -> set[str]:
    """Return the modules under :data:`SMALL` lines that only one module imports, which is in the same folder."""
    users: dict[str, set[str]] = {source.name: set() for source in sources}
    for source in sources:
        for _, target in imports(source):
            users.get(target, set()).add(source.name)
    small = [source.name for source in sources if len(source.text.splitlines()) < SMALL]
    alone = [name for name in small if len(users[name]) == 1]
    return {name for name in alone if {user.rpartition(".")[0] for user in users[name]} == {name.rpartition(".")[0]}}


def test_a_small_module_with_one_user_is_part_of_it() -> None:
    alone = single_users(ours())
    assert alone == SMALL_MODULES, f"join with the module that imports it: {alone - SMALL_MODULES}"
    texts = {"plan.a": f"from {PACKAGE}.plan.b import c", "plan.b": "c = 1", "plan.d": "\n" * SMALL}
    sources = [_source(name, text) for name, text in {**texts, "cli.e": f"import {PACKAGE}.plan.d"}.items()]
    assert single_users(sources) == {f"{PACKAGE}.plan.b"}


def test_no_import_cycle() -> None:
    assert not find_cycles(ours())


def test_no_import_cycle_in_core_with_annotations() -> None:
    core = [source for source in ours() if source.name.startswith(f"{PACKAGE}.core.")]
    assert not find_cycles(core, at_run_time=False)


def test_budgets_of_tests_examples_and_benchmarks() -> None:
    assert_none(complaint for source in around() for complaint in check_sizes(source))


def test_imports_of_tests_examples_and_benchmarks_exist() -> None:
    """mypy checks the package only, so a renamed function would otherwise fail only when a benchmark runs."""
    every = {source.name: source for source in (*ours(), *around())}
    assert_none(complaint for source in every.values() for complaint in missing_imports(source, every))


def test_missing_imports_are_detected() -> None:
    every = {name: Source(name, text) for name, text in (("shardwise.a", "x = 1\nif x:\n    def y(): ..."), ("b", ""))}
    text = "from shardwise.a import x, y, z\nfrom shardwise import a, b\nfrom shardwise.b import c\nfrom torch import d"
    text += "\nfrom shardwise.world.below import e"
    every["shardwise"] = Source("shardwise", "")
    every["shardwise.world"] = Source("shardwise.world", "__getattr__ = install_aliases(WORLD)")
    found = [complaint.rsplit(" ", 1)[-1] for complaint in missing_imports(Source("b", text), every)]
    assert found == ["shardwise.a.z", "shardwise.b", "shardwise.b.c"]


def test_exceptions_are_still_needed() -> None:
    known = {source.name: {name for name, _ in functions(source.tree)} for source in ours()}
    for module, names in PUBLISHED_SIGNATURES.items():
        assert known[f"{PACKAGE}.{module}"] >= {*names}, module
    assert MANY_ATTRIBUTES.keys() <= {name for source in ours() for name, _ in many_attributes(source)}


KNOWN = ("plan", "core.shards.layout", "core.shards.gather", "core.engine", "testing", "cli.main")
MODULES = frozenset(f"{PACKAGE}.{name}" for name in KNOWN)


def _source(name: str, text: str) -> Source:
    return Source(f"{PACKAGE}.{name}", text, MODULES)


MANY = [str(number) for number in range(21)]
BAD: list[tuple[Checker, Source, str]] = [
    (check_layers, _source("plan", "from shardwise.core.engine import x"), "not below"),
    (check_layers, _source("core.comm.x", "from shardwise.core.shards import gather"), "not below"),
    (check_layers, _source("core.engine", "def f():\n    from shardwise import testing"), "only tests"),
    (check_layers, _source("novelty", ""), "no row"),
    (check_attributes, _source("plan", f"class A:\n def f(self):\n  self.a{' = self.a'.join(MANY)} = 0"), "21"),
    (check_front_ends, _source("zero.x", "from shardwise.core.engine.module import ShardedModule"), "from session"),
    (check_front_ends, _source("cli.x", "def f(session):\n    return session._engine.pool.peak"), "engine.pool"),
    (check_sizes, _source("plan", "\n" * 901), "901 lines"),
    (check_sizes, _source("plan", "x = 1\n" * 601), "601 lines of code"),
    (check_sizes, _source("core.shards.utils", ""), "name the module"),
    (check_sizes, _source("plan", "class A:\n def f(self):\n" + "  pass\n" * 60), "61 lines"),
    (check_sizes, _source("plan", "def f(a, b, c, d, e, f, g, *, h, i): pass"), "9 parameters"),
    (check_state, _source("plan", "def f():\n global x\n x = 1"), "global x"),
    (check_state, _source("plan", "import os\nx = os.environ['A']"), "environment"),
    (check_devices, _source("core.shards.gather", "import torch\nx = torch.cuda.current_stream()"), "current_stream"),
    (check_devices, _source("core.shards.gather", "tensor.record_stream(stream)"), "record_stream"),
    (check_devices, _source("core.shards.gather", "a.copy_(b, non_blocking=True)"), "copy_(non_blocking=)"),
    (
        check_devices,
        _source("core.shards.gather", "import torch\ntorch.empty(3, pin_memory=pin)"),
        "empty(pin_memory=)",
    ),
    (check_docstrings, _source("plan", "'doc'\ndef f(): pass"), "f has no docstring"),
    (check_raises, _source("plan", "raise ValueError('bad')"), "ValueError"),
    (check_raises, _source("plan", "raise NotImplementedError(f'soon')"), "NotImplementedError"),
    (check_all, _source("plan", "__all__ = ['a', 'b']\na = 1"), "'b'"),
]


@pytest.mark.parametrize(("checker", "source", "expected"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_checker_finds(checker: Checker, source: Source, expected: str) -> None:
    assert any(expected in complaint for complaint in checker(source)), checker(source)


GOOD: list[tuple[Checker, Source]] = [
    (check_layers, _source("core.engine", "from shardwise.core.shards.gather import P\nimport torch")),
    (check_layers, _source("core.engine", "from shardwise import plan")),
    (check_layers, _source("core.shards.gather", "from shardwise.core.shards import layout")),
    (check_layers, _source("testing", "from shardwise.cli import main")),
    (check_front_ends, _source("zero.x", "from shardwise.session import A\nfrom shardwise.core.mesh import Mesh")),
    (check_front_ends, _source("session", "def f(session):\n    return session._engine.pool.peak")),
    (check_state, _source("cli.main", "import os\nx = os.environ")),
    (check_devices, _source("core.base.device", "import torch\nx = torch.cuda.current_stream(device)")),
    (check_devices, _source("plan", "import torch\ndef f(s: torch.cuda.Stream): return torch.cuda.is_available()")),
    (check_raises, _source("plan", "try:\n  pass\nexcept ValueError as e:\n  raise\n")),
    (check_raises, _source("plan", "raise ValueError(f'{x} is odd' ' here')\nraise ValueError(message)")),
    (check_docstrings, _source("plan", "'doc'\ndef _f(): pass\nasync def g():\n 'doc'")),
    (check_all, _source("plan", "__all__ = ['a', 'b', 'c']\nfrom x import a\nb: int = 1\nif 1:\n def c(): pass")),
]


@pytest.mark.parametrize(("checker", "source"), GOOD, ids=lambda value: getattr(value, "__name__", None))
def test_checker_accepts(checker: Checker, source: Source) -> None:
    assert checker(source) == []


def test_cycles_are_found() -> None:
    a = _source("plan", "from shardwise.core.engine import x")
    b = _source("core.engine", "def f():\n import shardwise.plan")
    assert find_cycles([a, b]) == ["shardwise.core.engine -> shardwise.plan -> shardwise.core.engine"]
    hidden = _source("plan", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from shardwise.session import x")
    assert find_cycles([hidden, b]) == []
