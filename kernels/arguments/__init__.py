"""Arguments of the operations in every backend, and their checks.

checks            checks that all backends share
pages             the rows of KV pages
gated_delta       the gated delta rule's weights and checks
sampling_inputs   sampling options and edits of logits
device_counts     token counts on the device
"""
