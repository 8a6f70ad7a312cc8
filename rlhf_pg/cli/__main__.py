"""`python -m rlhf_pg.cli` runs the `rlhf-pg` command."""

from rlhf_pg.cli.main import main

if __name__ == "__main__":
    main()
