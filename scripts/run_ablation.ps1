# Compare the drafting methods: ./scripts/run_ablation.ps1 -Prompt "import os" -Runner "uv run infer.py --device cpu"
# Writes scripts/ablation_results.csv, or -Out FILE. Further arguments are those of eagle-triton ablation.
[CmdletBinding(PositionalBinding = $false)]
param(
    [string[]]$Prompt = @(),
    [string]$Runner = "",
    [string]$Out = (Join-Path $PSScriptRoot "ablation_results.csv"),
    [Parameter(ValueFromRemainingArguments = $true)][string[]]$Rest = @()
)
$root = Split-Path -Parent $PSScriptRoot
$found = @(".venv/bin/python", ".venv/Scripts/python.exe") | ForEach-Object { Join-Path $root $_ } | Where-Object { Test-Path $_ }
$python = if ($env:EAGLE_TRITON_PYTHON) { $env:EAGLE_TRITON_PYTHON } elseif ($found) { @($found)[0] } else { "python" }
$options = @("--out", $Out)
foreach ($text in $Prompt) { $options += @("--prompt", $text) }
if ($Runner) { $options += @("--runner", $Runner) }
$before = $env:PYTHONPATH
$env:PYTHONPATH = if ($before) { "$root$([IO.Path]::PathSeparator)$before" } else { $root }
try {
    & $python -m eagle_triton.cli.main ablation @options @Rest
    $code = $LASTEXITCODE
} finally {
    $env:PYTHONPATH = $before
}
exit $code
