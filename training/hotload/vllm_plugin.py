"""vLLM worker extension that takes changed weights in place; loaded with `--worker-extension-cls`.

Importing it, which vLLM does before it loads the model, keeps linear weights where they can be written and registers the
transfer engine `groundhop`. What a worker can do is in `receiver/vllm_worker.py`.
"""

from groundhop.training.hotload.receiver.vllm_engine import register
from groundhop.training.hotload.receiver.vllm_packing import keep_weights
from groundhop.training.hotload.receiver.vllm_worker import PlacementReceiver

keep_weights()
register()


class WeightReceiver(PlacementReceiver):
    """The methods that vLLM adds to each worker; called by name through `collective_rpc`."""
