"""Entry point of `python -m llava_fsdp.prepare`; the program is in main.py."""

from llava_fsdp.runtime.log import leave_noise_out

if __name__ == "__main__":
    leave_noise_out()  # before transformers is imported

    from llava_fsdp.prepare.main import main

    main()
