"""Lists of tensors, one launch for all: ``multi_norm``, ``multi_count_zeros``, ``multi_scale_``, ``multi_clip_``,
``multi_copy_``, ``multi_clip_norm_``, ``tensor_list``, and the updates behind ``rtkernels.optim``
(``multi_adamw.py``, ``multi_lion.py``, ``multi_muon.py``). Device code: ``cuda_src/multi/``. Uses no other family.
"""
