"""`python -m jali.demo`: masks on real text, then three small language models."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import jali

from . import gallery, train


def main() -> None:
    """Runs both parts and says where the files are."""
    parser = argparse.ArgumentParser(prog="jali demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter sequences and trainings")
    parser.add_argument("--seconds", type=float, help="seconds of each training (30; quick 5)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the files")
    args = parser.parse_args()
    begin = time.perf_counter()
    seconds = args.seconds or (5 if args.quick else 30)
    print(f"Jali {jali.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    gallery.main(args.out, length=2048 if args.quick else 4096, rounds=3 if args.quick else 5)
    train.main(seconds, args.out)
    print(f"\nPictures and tables are in {args.out}/. {time.perf_counter() - begin:.0f} s in all.")


if __name__ == "__main__":
    main()
