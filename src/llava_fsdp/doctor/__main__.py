"""Entry point of `python -m llava_fsdp.doctor`, the command that checks this machine for a training (see main.py)."""

from llava_fsdp.runtime.log import leave_noise_out

if __name__ == "__main__":
    leave_noise_out()  # before transformers is imported

    from llava_fsdp.doctor.main import main

    main()
