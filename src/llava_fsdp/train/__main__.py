"""The entry `torchrun -m llava_fsdp.train`; main.py has what it does."""

from llava_fsdp.config import Config, cli

if __name__ == "__main__":
    cli.begin("train", Config)  # before torch is imported, which takes seconds

    from llava_fsdp.train.main import main

    main()
