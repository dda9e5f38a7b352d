"""Entry point of `python -m llava_fsdp.report`, the command that writes report pages (see main.py)."""

from llava_fsdp.report.main import main

if __name__ == "__main__":
    main()
