"""A Triton python_backend model that tells where a batch's time goes.

Copy ../python/stages.py beside this file, and these lines into your model: each answer gets a response parameter
server_timing, which weir reads from the JSON of /v2/models/<name>/infer. Triton passes it on untouched.

What is the model here is only a stand-in: it makes the text of the samples' loudness.
"""

import time

import numpy as np
import triton_python_backend_utils as pb_utils

import stages


class TritonPythonModel:
    def execute(self, requests):
        records = [stages.Record() for _ in requests]  # one a request
        with stages.stage("preprocess", records=records):
            audio = [pb_utils.get_input_tensor_by_name(r, "AUDIO").as_numpy() for r in requests]
            longest = max(len(one) for one in audio)
        with stages.stage("forward", batch=len(requests), seq=longest, records=records):
            texts = self.infer(audio)
        with stages.stage("postprocess", records=records):
            tensors = [pb_utils.Tensor("TEXT", np.array([text.encode()], dtype=object)) for text in texts]
        return [answer(tensor, record) for tensor, record in zip(tensors, records)]

    def infer(self, audio):
        time.sleep(0.01 * len(audio))
        return [f"{np.abs(one).mean():.2f}" for one in audio]


def answer(tensor, record):
    return pb_utils.InferenceResponse(output_tensors=[tensor], parameters={"server_timing": record.value()})
