"""Makes instances of EC2: docs/spec/aws-provider.md.

Start with `backend`; `api` has the calls to AWS, and only `boto` imports boto3.
"""
