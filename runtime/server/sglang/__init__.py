"""SGLang's native API: `endpoints` parses requests, `bodies` writes responses."""
