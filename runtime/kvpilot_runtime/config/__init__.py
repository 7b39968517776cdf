"""Engine settings that our dtypes support. These modules do not import vLLM."""
