"""Lists of tensors, one launch for all: ``multi_norm``, ``multi_count_zeros``, ``multi_scale_``, ``multi_clip_``,
``multi_copy_``, ``multi_clip_norm_``, ``tensor_list``, and the update behind ``rtkernels.optim.AdamW``
(``multi_adamw.py``). Device code: ``cuda_src/multi/``. Uses no other family.
"""
