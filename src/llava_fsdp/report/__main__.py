"""The entry `python -m llava_fsdp.report`; main.py has what it does."""

from llava_fsdp.report.main import main

if __name__ == "__main__":
    main()
