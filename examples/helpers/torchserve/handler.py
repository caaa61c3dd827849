"""A TorchServe handler that tells where a batch's time goes.

Copy ../python/stages.py beside this file, name it in --extra-files, and take these lines into your handler: each answer
gets the header Server-Timing. The handler's base class has the three steps already; here they are timed around it.
"""

from ts.torch_handler.base_handler import BaseHandler

import stages


class TimedHandler(BaseHandler):
    def handle(self, data, context):
        records = [stages.Record() for _ in data]  # one a request of the batch
        with stages.stage("preprocess", records=records):
            batch = self.preprocess(data)
        with stages.stage("forward", batch=len(data), records=records):
            output = self.inference(batch)
        with stages.stage("postprocess", records=records):
            answers = self.postprocess(output)
        for i, record in enumerate(records):  # the index is the request's place in the batch
            context.set_response_header(i, "Server-Timing", record.value())
        return answers
