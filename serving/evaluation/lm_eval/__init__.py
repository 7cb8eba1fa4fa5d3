"""Models for the Language Model Evaluation Harness, `lm_eval` (the extra `lm-eval`).

    python -m jaxshare.serving.evaluation.lm_eval run --model jaxshare \\
        --model_args pretrained=FOLDER --tasks hellaswag

takes all options of `lm_eval`. In Python `lm_eval.simple_evaluate` takes a
`jaxshare.serving.evaluation.lm_eval.model.JaxshareLM`.
"""
