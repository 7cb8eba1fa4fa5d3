"""Configurations of published models without experts, in the words of their config.json."""

from jaxshare.models.config import ModelConfig

LLAMA_8B = ModelConfig.from_json(
    dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=131072,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_scaling=dict(
            factor=8.0,
            high_freq_factor=4.0,
            low_freq_factor=1.0,
            original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
        rope_theta=500000.0,
        tie_word_embeddings=False,
        vocab_size=128256,
    )
)
QWQ_32B = ModelConfig.from_json(
    dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        hidden_act="silu",
        hidden_size=5120,
        intermediate_size=27648,
        max_position_embeddings=40960,
        max_window_layers=64,
        num_attention_heads=40,
        num_hidden_layers=64,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        sliding_window=32768,
        tie_word_embeddings=False,
        use_sliding_window=False,
        vocab_size=152064,
    )
)
"""Qwen2.5-32B has the same shape."""
