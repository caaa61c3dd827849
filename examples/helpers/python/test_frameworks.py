"""The examples for Triton and TorchServe, with as much of those frameworks as the examples touch: neither is packaged."""

import importlib
import os
import sys
import types
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


def load(folder, name):
    sys.path.insert(0, os.path.join(HERE, "..", folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


class Triton(unittest.TestCase):
    def test_each_response_tells_its_batch(self):
        class Array(list):
            def as_numpy(self):
                return self

            def mean(self):
                return sum(self) / len(self)

        numpy = types.SimpleNamespace(abs=lambda a: Array(map(abs, a)), array=lambda v, dtype: v)
        responses = []

        def response(output_tensors, parameters):
            responses.append((output_tensors, parameters))
            return responses[-1]

        pb_utils = types.SimpleNamespace(
            get_input_tensor_by_name=lambda request, name: Array(request[name]), Tensor=lambda name, value: (name, value), InferenceResponse=response
        )
        for name, module in (("numpy", numpy), ("triton_python_backend_utils", pb_utils)):
            previous = sys.modules.get(name)
            sys.modules[name] = module
            self.addCleanup(lambda n=name, p=previous: sys.modules.pop(n) if p is None else sys.modules.__setitem__(n, p))
        model = load("triton", "model").TritonPythonModel()
        out = model.execute([{"AUDIO": [1, -1]}, {"AUDIO": [3, 3, 3]}])
        self.assertEqual([tensors[0][1] for tensors, _ in out], [[b"1.00"], [b"3.00"]])
        for _, parameters in out:
            self.assertRegex(parameters["server_timing"], r"^preprocess;dur=[\d.]+, forward;dur=[\d.]+;batch=2;seq=3, postprocess;dur=[\d.]+, total;dur=[\d.]+$")


class TorchServe(unittest.TestCase):
    def test_each_request_of_the_batch_gets_its_header(self):
        class BaseHandler:
            def preprocess(self, data):
                return data

            def inference(self, data):
                return [x * 2 for x in data]

            postprocess = preprocess

        for name in ("ts", "ts.torch_handler", "ts.torch_handler.base_handler"):
            sys.modules[name] = types.SimpleNamespace(BaseHandler=BaseHandler, __path__=[])
            self.addCleanup(sys.modules.pop, name)
        headers = {}
        context = types.SimpleNamespace(set_response_header=lambda i, name, value: headers.__setitem__((i, name), value))
        self.assertEqual(load("torchserve", "handler").TimedHandler().handle([1, 2, 3], context), [2, 4, 6])
        self.assertEqual(sorted(headers), [(i, "Server-Timing") for i in range(3)])
        self.assertRegex(headers[2, "Server-Timing"], r"^preprocess;dur=[\d.]+, forward;dur=[\d.]+;batch=3, ")


if __name__ == "__main__":
    unittest.main()
