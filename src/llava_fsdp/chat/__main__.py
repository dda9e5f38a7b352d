"""Entry point of `python -m llava_fsdp.chat`; see main.py for what it does."""

from llava_fsdp.runtime.log import leave_noise_out

if __name__ == "__main__":
    leave_noise_out()  # before transformers is imported

    from llava_fsdp.chat.main import main

    main()
