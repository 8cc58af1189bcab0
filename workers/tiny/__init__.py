"""The built-in model pair: `overstory-tiny` and its DFlash drafter, their recipe and their oracle.

`pair/` holds the trained weights in Hugging Face format; `paths.resolve_model` finds them by name.
The model code here is an independent implementation of the same architectures that SGLang and
transformers load: tests compare the three. See `MODEL_CARD.md` for data, licences and quality.
"""
