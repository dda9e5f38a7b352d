"""Entry point of `python -m llava_fsdp.migrate`, which translates training scripts of other systems into llava_fsdp
commands; see migrate/main.py."""

from llava_fsdp.runtime.process.safe_path import prepare_python

if __name__ == "__main__":
    prepare_python()  # before other imports, which files there might hide

from llava_fsdp.migrate.main import main

if __name__ == "__main__":
    main()
