"""What an engine says of itself and of its configuration, by DeepSpeed's names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from shardwise.checked import whole
from shardwise.comm import ranks_of
from shardwise.deepspeed.config import Batch
from shardwise.deepspeed.config_object import OffloadDeviceEnum, OffloadStateTypeEnum, Section
from shardwise.deepspeed.process_groups import get_sequence_parallel_group
from shardwise.deepspeed.written import Written

__all__ = ["ABSENT", "Facts"]

ZERO = "zero_optimization"


def _value(path: str) -> Callable[[Facts], Any]:
    def get(self: Facts) -> Any:
        return self.settings[path]

    get.__doc__ = f"``{path}`` of the configuration."
    return get


def _block(path: str) -> Callable[[Facts], Section | None]:
    def get(self: Facts) -> Section | None:
        return Section(self.settings, path) if path in self.settings.sections else None

    get.__doc__ = f"The block ``{path}`` of the configuration; ``None`` where there is none."
    return get


def _always(value: Any, why: str) -> Callable[[Facts], Any]:
    def get(self: Facts) -> Any:
        return copy.copy(value)

    get.__doc__ = f"Always ``{value!r}``: {why}."
    return get


_REDUCED = "gradients are reduced inside backward passes; use torch.distributed for tensors of your own"
_SAMPLES = "choose the samples in the program's own data loader"
_COMPILED = "engine.compile() is torch.compile; there are no passes of DeepSpeed's compiler"
_TIMES = "wall_clock_breakdown logs the times of forward, backward and step"
_REFUSED = "what it is about is refused in a configuration"
_CURVES = ("verbose", "max_iter", "tol", "stability", "gas_boundary_resolution", "layer_name", "layer_num")
_TUNING = ("start_profile_step", "end_profile_step", "metric_path", "model_info_path", "metric", "profile_model_info")
ABSENT = {
    **dict.fromkeys(("allreduce_bucket", "allreduce_and_copy", "allreduce_no_retain"), _REDUCED),
    **dict.fromkeys(("buffered_allreduce_fallback", "sparse_allreduce", "sparse_all_gather"), _REDUCED),
    **dict.fromkeys(("sparse_allreduce_bucket", "sparse_allreduce_no_retain", "all_gather_scalar"), _REDUCED),
    "set_custom_curriculum_learning_schedule": _SAMPLES,
    "random_ltd_initialize": "drop tokens in the model",
    "set_data_post_process_func": "give initialize a collate_fn",
    "clip_fp32_gradients": "step() clips to gradient_clipping; optimizer.clip_grad_by_norm(norm) does it before",
    **dict.fromkeys(("timers", "engine_timers", "get_wall_clock_timers", "print_forward_breakdown"), _TIMES),
    **dict.fromkeys(("register_compile_pass", "get_compile_time", "get_deepcompile_backend"), _COMPILED),
    **dict.fromkeys(("get_deepspeed_compile_backend", "get_autosp_backend", "get_autotp_backend"), _COMPILED),
    **dict.fromkeys((f"eigenvalue_{name}" for name in _CURVES), _REFUSED),
    **dict.fromkeys((f"autotuning_{name}" for name in _TUNING), _REFUSED),
    **dict.fromkeys(("pld_theta", "pld_gamma", "quantize_training"), _REFUSED),
    "zero_grad_hooks": "gradients are always reduced by hooks; no key turns them off",
    "load_moe_state_dict": "there are no experts on ranks of their own here; load_checkpoint reads whole models",
}
"""Of DeepSpeed's engine and not of this one: what to do instead, in the error of who asks for it."""

NOT_HERE = "what it would turn on is refused"


class Facts(Written):
    """The part of an engine that only answers. Getters of keys give what was configured, or the key's default."""

    training_dataloader: Any

    zero_optimization_stage = _value(f"{ZERO}.stage")
    zero_reduce_scatter = _value(f"{ZERO}.reduce_scatter")
    zero_overlap_comm = _value(f"{ZERO}.overlap_comm")
    zero_offload_optimizer = _block(f"{ZERO}.offload_optimizer")
    zero_offload_param = _block(f"{ZERO}.offload_param")
    zero_partial_offload = _value(f"{ZERO}.offload_optimizer.ratio")
    super_offload = _value(f"{ZERO}.offload_optimizer.super_offload")
    cpuadam_cores_perc = _value(f"{ZERO}.offload_optimizer.cpuadam_cores_perc")
    zero_sub_group_size = _value(f"{ZERO}.sub_group_size")
    zero_reduce_bucket_size = _value(f"{ZERO}.reduce_bucket_size")
    zero_multi_rank_bucket_allreduce = _value(f"{ZERO}.use_multi_rank_bucket_allreduce")
    zero_allgather_bucket_size = _value(f"{ZERO}.allgather_bucket_size")
    zero_compute_grad_norm = _value(f"{ZERO}.compute_grad_norm")
    zero_contiguous_gradients = _value(f"{ZERO}.contiguous_gradients")
    zero_load_from_fp32_weights = _value(f"{ZERO}.load_from_fp32_weights")
    zero_elastic_checkpoint = _value(f"{ZERO}.elastic_checkpoint")
    zero_max_live_parameters = _value(f"{ZERO}.stage3_max_live_parameters")
    zero_max_reuse_distance = _value(f"{ZERO}.stage3_max_reuse_distance")
    zero_prefetch_bucket_size = _value(f"{ZERO}.stage3_prefetch_bucket_size")
    zero_module_granularity_threshold = _value(f"{ZERO}.stage3_module_granularity_threshold")
    zero_param_persistence_threshold = _value(f"{ZERO}.stage3_param_persistence_threshold")
    zero_model_persistence_threshold = _value(f"{ZERO}.stage3_model_persistence_threshold")
    zero_gather_16bit_weights_on_model_save = _value(f"{ZERO}.stage3_gather_16bit_weights_on_model_save")
    zero_legacy_stage1 = _value(f"{ZERO}.legacy_stage1")
    zero_ignore_unused_parameters = _value(f"{ZERO}.ignore_unused_parameters")
    zero_save_muon_momentum_buffer_in_memory = _value(f"{ZERO}.save_muon_momentum_buffer_in_memory")
    zero_allgather_partitions = _value(f"{ZERO}.allgather_partitions")
    zero_round_robin_gradients = _value(f"{ZERO}.round_robin_gradients")
    zero_parameter_alignment = _value(f"{ZERO}.parameter_alignment")
    zero_hpz_partition_size = _value(f"{ZERO}.zero_hpz_partition_size")
    zero_quantized_weights = _value(f"{ZERO}.zero_quantized_weights")
    zero_quantized_nontrainable_weights = _value(f"{ZERO}.zero_quantized_nontrainable_weights")
    zero_quantized_gradients = _value(f"{ZERO}.zero_quantized_gradients")
    mics_shard_size = _value(f"{ZERO}.mics_shard_size")
    zero_log_trace_cache_warnings = _value(f"{ZERO}.log_trace_cache_warnings")
    zero_allgather_sequential = _value(f"{ZERO}.stage3_allgather_sequential")
    is_sanity_checks_enabled = _value(f"{ZERO}.enable_sanity_checks")
    zero_allow_untested_optimizer = _value("zero_allow_untested_optimizer")
    zero_force_ds_cpu_optimizer = _value("zero_force_ds_cpu_optimizer")
    zero_use_cpu_optimizer = _always(False, "the optimizer is the user's own, wherever its state is")
    zero_cpu_offload = _always(False, "as in DeepSpeed, where offload_optimizer took its place")
    zenflow_config = _always(None, NOT_HERE)

    fp16_enabled = _value("fp16.enabled")
    fp16_auto_cast = _value("fp16.auto_cast")
    fp16_master_weights_and_gradients = _value("fp16.fp16_master_weights_and_grads")
    loss_scale = _value("fp16.loss_scale")
    bfloat16_enabled = _value("bf16.enabled")
    bf16_master_weights_and_gradients = _value("bf16.bf16_master_weights_and_grads")
    bf16_optimizer_states = _value("bf16.bf16_optimizer_states")

    optimizer_params = _value("optimizer.params")
    optimizer_legacy_fusion = _value("optimizer.legacy_fusion")
    scheduler_name = _value("scheduler.type")
    scheduler_params = _value("scheduler.params")
    managed_gradient_accumulation = _value("managed_gradient_accumulation")
    gradient_predivide_factor = _value("gradient_predivide_factor")
    steps_per_print = _value("steps_per_print")
    wall_clock_breakdown = _value("wall_clock_breakdown")
    memory_breakdown = _value("memory_breakdown")
    dump_state = _value("dump_state")
    log_level = _value("log_level")
    dataloader_drop_last = _value("dataloader_drop_last")
    sparse_gradients_enabled = _value("sparse_gradients")
    use_node_local_storage = _value("use_node_local_storage")
    graph_harvesting = _value("graph_harvesting")
    checkpoint_serialization_enabled = _value("checkpoint.checkpoint_serialization")
    checkpoint_writer_enabled = _always(False, "every rank always writes its own part")
    load_universal_checkpoint = _value("checkpoint.load_universal")
    autotp_size = _value("tensor_parallel.autotp_size")
    tensor_parallel_config = _block("tensor_parallel")

    flops_profiler_enabled = _value("flops_profiler.enabled")
    flops_profiler_recompute_fwd_factor = _value("flops_profiler.recompute_fwd_factor")
    flops_profiler_profile_step = _value("flops_profiler.profile_step")
    flops_profiler_module_depth = _value("flops_profiler.module_depth")
    flops_profiler_top_modules = _value("flops_profiler.top_modules")
    flops_profiler_detailed = _value("flops_profiler.detailed")
    flops_profiler_output_file = _value("flops_profiler.output_file")

    autotuning_enabled = _always(False, NOT_HERE)
    torch_autocast_enabled = _value("torch_autocast.enabled")
    torch_autocast_dtype = _value("torch_autocast.dtype")
    torch_autocast_lower_precision_safe_modules = _value("torch_autocast.lower_precision_safe_modules")
    data_efficiency_enabled = data_sampling_enabled = curriculum_learning_enabled = _always(False, NOT_HERE)
    curriculum_enabled_legacy = random_ltd_enabled = pld_enabled = eigenvalue_enabled = _always(False, NOT_HERE)
    data_efficiency_config = data_sampling_config = curriculum_learning_config = _always({}, NOT_HERE)
    curriculum_params_legacy = random_ltd_config = pld_params = _always({}, NOT_HERE)
    compile_zero_optimization_stage = compile_autosp = compile_autotp = _always(False, NOT_HERE)
    is_deepcompile_enabled = is_deepcompile_active = uses_parallelization_pass_only = _always(False, NOT_HERE)
    amp_enabled = amp_params = elasticity_enabled = _always(False, NOT_HERE)
    is_elastic_model_parallel_supported = get_pld_theta = _always(None, NOT_HERE)
    swap_tensor_config = zeropp_loco_param = _always(None, NOT_HERE)

    # nn.Module has no such attributes, and programs read them without asking.
    has_moe_layers = pipeline_parallelism = False
    progressive_layer_drop = eigenvalue = quantizer = None

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.session.mesh.device

    @property
    def global_rank(self) -> int:
        """Of this process, among all."""
        mesh = self.session.mesh
        return mesh.ranks[mesh.rank]

    @property
    def local_rank(self) -> int:
        """The number of this rank's GPU; its rank, on a CPU."""
        index = self.device.index
        return self.global_rank if index is None else index

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return len(ranks_of("all ranks", None))

    @property
    def dp_world_size(self) -> int:
        """How many see different samples: all, but for tensor and sequence parallelism, and what an ``mpu`` says."""
        return self.session.mesh.data_ranks

    @property
    def config(self) -> dict[str, Any]:
        """The values that were given, in their blocks."""
        tree: dict[str, Any] = {}
        for path, value in self.settings.values.items():
            *blocks, name = path.split(".")
            place = tree
            for block in blocks:
                place = place.setdefault(block, {})
            place[name] = value
        return tree

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Weights of embeddings, where ``sparse_gradients`` asks to exchange their gradients as sparse ones.

        They are reduced dense, as all others.
        """
        if not self.settings["sparse_gradients"]:
            return set()
        named = self.session.model.named_modules()
        return {f"{name}.weight" for name, module in named if isinstance(module, nn.Embedding | nn.EmbeddingBag)}

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; ``None`` before the first."""
        return self.optimizer.get_grad_norm() if self.optimizer is not None else None

    def _of_groups(self, name: str) -> list[Any]:
        return [group.get(name, 0.0) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_lr(self) -> list[float]:
        """By param group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Betas, or the momentum of an optimizer without them, by param group."""
        betas = self._of_groups("betas")
        return betas if any(betas) else self._of_groups("momentum")

    def train_batch_size(self) -> int:
        """Samples a step, over all ranks."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples a backward pass and rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Backward passes a step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """All three of them."""
        return self._batch.train, self._batch.micro, self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of backward passes a step.

        Raises:
            ValueError: it is no multiple of the micro-batch over all ranks.
        """
        together = self._batch.micro * self.dp_world_size
        if whole("train_batch_size", train_batch_size, 1, what="a number of samples") % together:
            raise ValueError(f"train_batch_size={train_batch_size}: give a multiple of {together} samples (all ranks')")
        self._batch = Batch(train_batch_size, self._batch.micro, train_batch_size // together)
        self.session.divide_own_passes(self._batch.accumulation)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch, and with it the batch."""
        whole("micro_batch_size", micro_batch_size, 1, what="a number of samples")
        accumulation = self._batch.accumulation
        self._batch = Batch(micro_batch_size * accumulation * self.dp_world_size, micro_batch_size, accumulation)

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move masters and optimizer state to host memory, and drop what is gathered, until :meth:`reload_states`.

        Masters and state have one home and move together. Parameters stay on the device (``offload_param`` moves these
        for good), and so do exchange buffers of gradients. Between steps, on every rank.

        Args:
            include: of :class:`~shardwise.deepspeed.config_object.OffloadStateTypeEnum`; ``None``: all that can move.
            device: ``"cpu"``; ``"none"`` does nothing.
            pin_memory: page-lock that memory, and keep it for the next time.
            non_blocking: no effect: the copies are waited for.

        Raises:
            NotImplementedError: ``lp_params`` in ``include``, or another device.
            RuntimeError: between a backward pass and its step.
        """
        if device == OffloadDeviceEnum.none:
            return
        if device != OffloadDeviceEnum.cpu or (include is not None and OffloadStateTypeEnum.lp_params in include):
            raise NotImplementedError(
                f"offload_states({include=!r:.80}, {device=}) is not available: give device='cpu', and leave lp_params "
                "out; zero_optimization.offload_param keeps parameters in host memory"
            )
        movable = (OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params)
        if include is None or any(kind in include for kind in movable):
            self.session.set_aside(pin_memory)
        else:
            self.session.drop_gathered()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what :meth:`offload_states` moved; without that nothing happens."""
        self.session.bring_back()

    @property
    def mp_world_size(self) -> int:
        """Ranks that hold parts of the same layers."""
        mesh = self.session.mesh
        return mesh.joined.size if mesh.joined is not None else mesh.tensor.size

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.settings.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether each rank keeps a shard of the gradients."""
        return self.settings.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether each rank keeps a shard of the parameters."""
        return self.settings.stage >= 3

    is_first_weights_partition_group = zero_optimization_partition_weights

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether state is at home on a disk."""
        return self.session.plan.tiers.state_disk_fraction > 0

    def postscale_gradients(self) -> bool:
        """See ``prescale_gradients``, whose opposite it is."""
        return not self.settings["prescale_gradients"]

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return bool(self.fp16_enabled()) and self.settings["fp16.loss_scale"] == 0

    def initial_dynamic_scale(self) -> float:
        """The first loss scale, where it moves."""
        return float(2.0 ** self.settings["fp16.initial_scale_power"])

    def dynamic_loss_scale_args(self) -> dict[str, Any] | None:
        """How a loss scale moves, where any of it is configured."""
        names = ("initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis", "consecutive_hysteresis")
        if not any(self.settings.given(f"fp16.{name}") for name in names):
            return None
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.settings["fp16.loss_scale_window"],
            "min_scale": self.settings["fp16.min_loss_scale"],
            "delayed_shift": self.settings["fp16.hysteresis"],
            "consecutive_hysteresis": self.settings["fp16.consecutive_hysteresis"],
        }

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """The dtype in which gradients travel; not given: that of the parameters."""
        given: torch.dtype | None = self.settings["communication_data_type"]
        return given or self.session.plan.precision.param_dtype

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of parameters, and in which gradients add up."""
        params = self.session.plan.precision.param_dtype or torch.float32
        return params, self.settings["data_types.grad_accum_dtype"] or params

    def optimizer_name(self) -> str | None:
        """The class of the optimizer that was given to ``initialize``; otherwise ``optimizer.type``."""
        if "optimizer.type" in self.settings.findings.ignored or self.settings["optimizer.type"] is None:
            return None if self.optimizer is None else type(self.optimizer.optimizer).__name__
        return str(self.settings["optimizer.type"])

    def aio_config(self) -> dict[str, Any]:
        """The block ``aio``, with defaults."""
        return Section(self.settings, "aio").as_dict()

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks compare their tags."""
        return bool(self.settings["checkpoint.tag_validation"] != "IGNORE")

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether different tags are an error."""
        return bool(self.settings["checkpoint.tag_validation"] == "FAIL")

    def _backward_epilogue(self) -> None:
        """After a pass of outputs of ``module``, where DeepSpeed's engine has to be told: nothing is left to do."""

    def get_type(self) -> list[Any]:
        """The entry ``type`` of each param group; 0.0 where there is none."""
        return self._of_groups("type")

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Whether samples have numbers."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Whether it is torch's ``IterableDataset``."""
        return isinstance(obj, IterableDataset)

    def get_tensor_parallel_rank(self) -> int:
        """Which part of its layers this rank holds."""
        mesh = self.session.mesh
        return mesh.joined.rank if mesh.joined is not None else mesh.tensor.rank

    get_model_parallel_rank = get_tensor_parallel_rank

    get_sequence_parallel_group = staticmethod(get_sequence_parallel_group)

    def get_data_parallel_rank(self) -> int:
        """Which samples this rank sees."""
        return self.session.mesh.data_rank

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that is stepped on the shards."""
        return None if self.optimizer is None else self.optimizer.optimizer

    client_optimizer = basic_optimizer
