"""Entry point of `python -m llava_fsdp.migrate`, the command that translates other systems' training scripts (see
main.py)."""

from llava_fsdp.migrate.main import main

if __name__ == "__main__":
    main()
