"""The entry `python -m llava_fsdp.migrate`; main.py has what it does."""

from llava_fsdp.migrate.main import main

if __name__ == "__main__":
    main()
