"""Configurations as Hjson files."""

from __future__ import annotations

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


def test_texts_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text(HAND)
    assert load_config(path) == load_config(str(path)) == AS_JSON
    path.write_text(HAND.strip().removeprefix("{").removesuffix("}"))
    assert load_config(path) == AS_JSON
    faults = {
        "a: 1\na: 2": "'a' occurs twice",
        "{a: {b: [1, 2}}": "",
        "{a 1}": "",
        "[1,]  #:": "holds list; a JSON object",
        '{"a": ' + 100_000 * "[": "nested too deeply",
        "a: " + 10_000 * "[" + 10_000 * "]" + "#": "nested too deeply",
    }
    for text, message in faults.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=f"ds.hjson.*{message}"):
            load_config(path)
    for text in ("ds_config.json", "x" * 5000):
        with pytest.raises(FileNotFoundError, match=r"cannot be read .*; give a dict"):
            load_config(text)


def test_hjson_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text(HAND)
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ValueError, match=r"it is not JSON: .* Install the package hjson"):
        load_config(path)
