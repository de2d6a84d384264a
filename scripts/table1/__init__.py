"""The paper's Table 1 beside ours."""
