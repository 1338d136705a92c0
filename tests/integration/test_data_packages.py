"""The packages that analysts use most, used in the sandbox."""

from __future__ import annotations

import pytest

from kernel_mcp.policy import DATA_MODULES
from tests.integration.agent import agent

pytestmark = [pytest.mark.anyio, pytest.mark.full, pytest.mark.timeout(600)]

CELLS = {
    """
import numpy as np
round(float(np.linalg.det(np.eye(3) * 2)), 3)
""": "8.0",
    """
import pandas as pd
df = pd.DataFrame({'k': list('aab'), 'v': [1, 2, 3]})
df.groupby('k')['v'].sum().to_dict()
""": "{'a': 3, 'b': 3}",
    """
from scipy import optimize
round(optimize.brentq(lambda x: x**2 - 2, 0, 2), 3)
""": "1.414",
    """
from sklearn.linear_model import LinearRegression
round(float(LinearRegression().fit([[0], [1], [2]], [1, 3, 5]).coef_[0]), 3)
""": "2.0",
    """
from PIL import Image
Image.new('RGB', (3, 2)).size
""": "(3, 2)",
    """
import polars as pl
pl.DataFrame({'a': [1, 2, 3]})['a'].sum()
""": "6",
    """
import pyarrow as pa, pyarrow.parquet as pq
pq.write_table(pa.table({'a': [1, 2]}), 'a.parquet')
pd.read_parquet('a.parquet')['a'].tolist()
""": "[1, 2]",
    """
import sympy as sp
x = sp.Symbol('x')
str(sp.integrate(2 * x, x))
""": "'x**2'",
    """
df.to_excel('a.xlsx', index=False)
pd.read_excel('a.xlsx')['v'].tolist()
""": "[1, 2, 3]",
}


async def test_the_ten_most_used_data_packages_work_in_the_sandbox() -> None:
    async with agent("--allow", ",".join(sorted(DATA_MODULES))) as notebook:
        for code, expected in CELLS.items():
            answer = await notebook.run(code, timeout=120, wait=500)
            assert answer.text == expected, code
        plot = await notebook.run(
            "import matplotlib.pyplot as plt\nplt.plot(df['v'])\nplt.show()", wait=120
        )
        assert [image.mime_type for image in plot.images] == ["image/png"]
