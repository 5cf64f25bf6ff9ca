"""The encoder side of SGLang's encode-prefill disaggregation (EPD), as of SGLang 0.5.23.

Nothing here imports SGLang, and nothing here unpickles anything.
"""
