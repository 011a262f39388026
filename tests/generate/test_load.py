"""Models of files: the same text whether weights are float32 or as the file holds them."""

import numpy as np
import pytest

from mpipar import Mesh, ThreadWorld, checkpoint
from mpipar.errors import CheckpointError
from mpipar.generate import Generator, Source, build_decoder
from mpipar.generate.tokenizer import Bytes
from mpipar.models import LlamaConfig, build_model

gguf = pytest.importorskip("gguf")
from tests.checkpoint.test_gguf import write  # noqa: E402

CONFIG = LlamaConfig(
    n_layers=3, width=96, n_heads=3, n_kv_heads=3, sequence=64, vocabulary=256, hidden=96
)
PROMPTS = [list(b"the same start, a"), list(b"the same start, b")]


def drawn():
    """Larger than at the start of training, so that no two scores lie close together."""
    values = build_model(CONFIG).init(3)
    return {n: a * (4 if a.ndim == 2 else 1) for n, a in values.items()}


@pytest.mark.parametrize(("axis", "n"), [("tp", 1), ("tp", 3), ("pp", 2)])
@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "Q8_0"])
def test_weights_as_stored_give_the_same_text_in_less_memory(tmp_path, axis, n, quantized):
    path = write(tmp_path / "m.gguf", CONFIG, drawn(), quantized=quantized)
    source = Source(path, checkpoint.open_pretrained(path).config, Bytes())

    def body(comm):
        with Mesh(comm, **{axis: n}) as mesh:
            texts = []
            for as_stored in (False, True):
                decoder = build_decoder(mesh, source, 32, 4, as_stored)
                texts.append(Generator(decoder).generate(PROMPTS, 9))
            whole = sum(a.nbytes for a in build_decoder(mesh, source, 1).parameters.values())
            return texts, decoder.parameters.n_bytes, whole

    alone = None
    for texts, kept, whole in ThreadWorld(n).run(body):
        assert texts[0] == texts[1]
        assert kept < whole
        assert alone in (None, texts[0])
        alone = texts[0]
    if n == 1:  # embedding, head and norms; the layers' matrices are not there
        assert kept == 4 * (2 * 256 * 96 + 7 * 96)
    if n == 1 and not quantized:
        model, weights, text = build_model(CONFIG), drawn(), list(PROMPTS[0])
        for _ in range(9):
            text.append(int(model.logits(weights, np.array([text]))[0, -1].argmax()))
        assert alone[0] == text[len(PROMPTS[0]) :]


def test_another_kind_of_file_has_no_stored_form(tmp_path):
    checkpoint.export_hf(tmp_path, CONFIG, drawn())
    source = Source(tmp_path, CONFIG, Bytes())

    def body(comm):
        with pytest.raises(CheckpointError, match="no GGUF file"):
            build_decoder(Mesh(comm), source, 8, 4, as_stored=True)

    ThreadWorld(1).run(body)
