"""The entry `python -m llava_fsdp.sweep`; main.py has what it does."""

from llava_fsdp.sweep.main import main

if __name__ == "__main__":
    main()
