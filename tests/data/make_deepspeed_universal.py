"""Write deepspeed_universal.tar.xz: directories of deepspeed.tar.xz that DeepSpeed's own ``ds_to_universal`` converted.

The script needs DeepSpeed (its repository at 0.19.6 was used) and no GPU:

    tar -xJf deepspeed.tar.xz
    python make_deepspeed_universal.py ds universal
    tar --sort=name --owner=0 --group=0 -cJf deepspeed_universal.tar.xz universal
"""

import argparse
import shutil
from pathlib import Path
from types import SimpleNamespace

from deepspeed.checkpoint.ds_to_universal import main as convert

CASES = ("zero1-2ranks-bf16", "zero2-2ranks-fp16", "zero3-2ranks-fp16")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    for case in CASES:
        (given.out / case).mkdir(parents=True)
        convert(
            SimpleNamespace(
                input_folder=str(given.source / case / "global_step3"),
                output_folder=str(given.out / case / "global_step3_universal"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
        shutil.copy(given.source / case / "truth.safetensors", given.out / case)


if __name__ == "__main__":
    main()
