"""Configurations as texts: Hjson files, and base64."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from shardwise.deepspeed.config import load_config

HAND = """
{
  // what people write by hand
  train_batch_size: 8   # eight
  'gradient_clipping': -0.5e1
  /* over
     lines */
  zero_optimization: {"stage": 3, offload_param: {device: "cpu",},}, // a comma too many
  optimizer:
  {
    type: AdamW   # no quotes: up to the end of the line
    params: {lr: 1e-3, "betas": [0.9
      0.99], fused: null}
  }
  x: [true false
  'it\\'s "so"', [], {}]
}
"""
AS_JSON = {
    "train_batch_size": 8,
    "gradient_clipping": -5.0,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "optimizer": {
        "type": "AdamW   # no quotes: up to the end of the line",
        "params": {"lr": 1e-3, "betas": [0.9, 0.99], "fused": None},
    },
    "x": ["true false", 'it\'s "so"', [], {}],
}


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


def test_texts_by_hand_and_in_base64(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text(HAND)
    braces = HAND.strip().removeprefix("{").removesuffix("}")
    assert load_config(path) == load_config(encoded(HAND)) == load_config(encoded(braces)) == AS_JSON
    assert load_config(encoded(json.dumps(AS_JSON) + "\n" * 400)) == AS_JSON  # longer than a file's name may be
    faults = {
        "a: 1\na: 2": "'a' stands twice",
        "{a: {b: [1, 2}}": "",
        "{a 1}": "",
        "[1,]  #:": "holds list; a JSON object",
        '{"a": ' + 100_000 * "[": "nested too deeply",
        "a: " + 10_000 * "[" + 10_000 * "]" + "#": "nested too deeply",
    }
    for text, message in faults.items():
        with pytest.raises(ValueError, match=f"in base64.*{message}"):
            load_config(encoded(text))
    for text in ("ds_config.json", "dsconfig", encoded("neither"), encoded("x")[:-1]):
        with pytest.raises(FileNotFoundError, match="no such file, and it is no configuration in base64"):
            load_config(text)


def test_hjson_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text(HAND)
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ValueError, match=r"it is not JSON: .* Install the package hjson"):
        load_config(path)
