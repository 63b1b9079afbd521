"""The program `eagle-triton`: a prompt answered by one drafting method or several, and their ablation.

`settings.py` says what it can be told, `decoding.py` answers, `ablation.py` compares.
"""
