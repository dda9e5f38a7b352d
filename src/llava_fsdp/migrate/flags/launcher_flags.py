"""Table of rules: what each flag of the launchers `deepspeed`, `torchrun` and `accelerate launch` becomes."""

from collections.abc import Mapping

from llava_fsdp.migrate.to_keys.keys import Rule, implied, mapped, rules, unsupported

NUMBER = mapped("the number of ranks: --nproc-per-node, and a factor of global_batch_size")
CHOSEN = mapped("the number of ranks, and CUDA_VISIBLE_DEVICES before the command")
ELASTIC = mapped("NNODES=MIN:MAX launch/multinode.sh, which is torchrun's --nnodes=MIN:MAX")
PLACE = mapped("torchrun's flag of the same meaning on several machines; --standalone needs no such flag")
RESTARTS = mapped("torchrun's --max-restarts; launch/node.sh and launch/multinode.sh have MAX_RESTARTS, 3 unless set")
LOGS = implied("rank 0 prints every worker's error and writes it to run_status.json; torchrun has --log-dir")
NOT_NEEDED = implied("torchrun needs no such flag")
BY_TORCHRUN = unsupported("torchrun is the launcher, and is started on every machine: launch/multinode.sh")
OUTSIDE = unsupported("do it before the command: CUDA_VISIBLE_DEVICES=0,1 and gpus=N here, numactl, the environment")
PIXELS = unsupported(
    "images are resized as the checkpoint's preprocessor_config.json says: write the limit into it, in a copy"
)

LAUNCHER: Mapping[str, Rule] = {
    **rules(NUMBER, "num_gpus num_accelerators num_nodes nproc_per_node nnodes num_processes num_machines"),
    **rules(CHOSEN, "include i"),
    **rules(ELASTIC, "min_elastic_nodes max_elastic_nodes elastic_training"),
    **rules(PLACE, """
        master_port master_addr node_rank standalone rdzv_backend rdzv_endpoint rdzv_id rdzv_conf local_addr
        numa_binding machine_rank main_process_ip main_process_port"""),
    "max_restarts": RESTARTS,
    **rules(LOGS, """
        enable_each_rank_log log_level q quiet monitor_interval event_log_handler log_dir r redirects t tee
        local_ranks_filter logs_specs debug"""),
    **rules(NOT_NEEDED, """
        module m no_python no_local_rank no_ssh no_ssh_check force_multi save_pid ssh_port start_method role use_env
        run_path same_network main_training_function"""),
    **rules(BY_TORCHRUN, """
        hostfile H launcher launcher_args mpirun_hostfile deepspeed_hostfile"""),
    **rules(OUTSIDE, "exclude e bind_cores_to_rank bind_core_list venv_script"),
    **rules(PIXELS, """
        MAX_PIXELS MIN_PIXELS IMAGE_MAX_TOKEN_NUM IMAGE_MIN_TOKEN_NUM MAX_NUM INPUT_SIZE HD_NUM NUM_CROPS
        MAX_SLICE_NUMS"""),
    "ROOT_IMAGE_DIR": mapped("data.images, the folder to which paths of images are relative"),
    **rules(implied("names are those of Hugging Face's hub, or folders"), "USE_HF USE_MODELSCOPE_HUB"),
    **rules(NOT_NEEDED, "FORCE_TORCHRUN DISABLE_VERSION_CHECK"),
    "autotuning": unsupported("llava-fsdp sweep runs the configurations that you name"),
}  # fmt: skip
