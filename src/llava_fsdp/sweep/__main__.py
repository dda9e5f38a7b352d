"""Entry point of `python -m llava_fsdp.sweep`, the command that runs several trainings (see main.py)."""

from llava_fsdp.sweep.main import main

if __name__ == "__main__":
    main()
