"""Implements the provider of EC2 instances (docs/spec/aws-provider.md).

Start reading at `backend`; `api` defines the calls to AWS, and only `boto` imports boto3.
"""
