"""Write LoRA adapter folders for whole models of transformers: peft loads them over the class, with its own names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from llava_fsdp.export.card.model_card import FolderKind
from llava_fsdp.export.write.adapter_folder import AdapterWriter, whole_rows
from llava_fsdp.export.write.formats import SourceModel
from llava_fsdp.export.write.whole_folder import WholeSource
from llava_fsdp.model.adapters.lora_files import OTHERS_FILES
from llava_fsdp.model.adapters.lora_names import is_adapter
from llava_fsdp.model.weights.tensor_files import Stored
from llava_fsdp.model.weights.weight_names import in_class_adapter


@dataclass(frozen=True)
class ClassAdapterWriter(AdapterWriter):
    """Writer of the LoRA adapter folders of a training of a whole model of transformers. No program but llava_fsdp
    reads what it saves beside the adapters, so that there is no file for the original LLaVA."""

    is_of_class, kind = True, FolderKind.adapters_of_class

    def rename(self, name: str) -> str:
        return in_class_adapter(name)

    def is_apart(self, name: str) -> bool:
        return not is_adapter(name)

    def write_others(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        """Write what was trained besides the adapters, if there is something."""
        renamed = {self.rename(name): whole_rows(tensor).contiguous().clone() for name, tensor in tensors.items()}
        if renamed:
            save_file(renamed, folder / OTHERS_FILES[0], metadata={"format": "pt"})


def writer_class(source: SourceModel | WholeSource) -> type[AdapterWriter]:
    """Return the class of the writer for a kind of model."""
    return ClassAdapterWriter if isinstance(source, WholeSource) else AdapterWriter
