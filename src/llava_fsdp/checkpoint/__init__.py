"""Checkpoints: what a run needs to continue, in files that prove themselves; docs/checkpoints.md has what they promise.

`saver` copies and writes, `commit` is the order of it; `verify` decides what may be continued from, `resume` continues;
`manifest` and `tensorfile` are the format, `layout` is who holds which rows, `facts` what is no tensor, `replicated`
compares what several ranks hold.
"""

from llava_fsdp.checkpoint.agree import on_all_ranks, on_first_rank
from llava_fsdp.checkpoint.commit import Beside
from llava_fsdp.checkpoint.disk import make_empty, sync_folder, sync_tree
from llava_fsdp.checkpoint.facts import plain
from llava_fsdp.checkpoint.layout import tensors
from llava_fsdp.checkpoint.manifest import STATE_FILE
from llava_fsdp.checkpoint.replicated import check_replicas
from llava_fsdp.checkpoint.resume import check_settings, continues, resume
from llava_fsdp.checkpoint.saver import Saver, is_due, open_saver
from llava_fsdp.checkpoint.verify import Checkpoint, newest_alone, verify
from llava_fsdp.checkpoint_names import FOLDER, list_checkpoints

__all__ = [
    "FOLDER", "STATE_FILE", "Beside", "Checkpoint", "Saver", "check_replicas", "check_settings", "continues", "is_due",
    "list_checkpoints", "make_empty", "newest_alone", "on_all_ranks", "on_first_rank", "open_saver", "plain", "resume",
    "sync_folder", "sync_tree", "tensors", "verify",
]  # fmt: skip
