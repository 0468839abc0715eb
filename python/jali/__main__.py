"""`python -m jali`: what is installed, what there is, what a problem would cost."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
