"""What smaller weights cost the demo model, on the beginning of the text of load_tests.quality."""

from __future__ import annotations

from pathlib import Path

import pytest

from load_tests.quality import MODEL, VARIANTS, measure, text_token_ids

pytestmark = pytest.mark.integration


def test_int8_quarters_float32s_weights_and_keeps_the_demo_models_quality(demo_model_dir: Path) -> None:
    token_ids = text_token_ids(MODEL)
    assert len(token_ids) > 2000
    whole, quantized = measure(MODEL, token_ids[:200], (VARIANTS[0], VARIANTS[3]))
    assert whole.agreement == 1
    assert 15 < whole.perplexity < 60
    assert quantized.weight_bytes < 0.255 * whole.weight_bytes
    assert 1 < quantized.perplexity / whole.perplexity < 1.03
    assert 0.9 < quantized.agreement < 1
