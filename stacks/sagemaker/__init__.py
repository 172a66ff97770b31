"""One run as a SageMaker training job, with our container: the request, its limits, its price."""
