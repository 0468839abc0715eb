"""Runs one case of a property again: python -m tests.fuzz.replay <property> '<json>'."""

from __future__ import annotations

import json
import sys

from tests.fuzz.properties import PROPERTIES


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in PROPERTIES:
        raise SystemExit(f"{__doc__}\nproperties: {', '.join(PROPERTIES)}")
    PROPERTIES[sys.argv[1]](json.loads(sys.argv[2]))
    print("passed")


if __name__ == "__main__":
    main()
