"""`python -m rlhf_pg.cli` is `rlhf-pg`."""

from rlhf_pg.cli.main import main

if __name__ == "__main__":
    main()
