(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const variable = name => style.getPropertyValue(name).trim();
    const resolve = value =>
      typeof value === "string" ? (value.startsWith("--") ? variable(value) : value)
      : Array.isArray(value) ? value.map(resolve)
      : value && typeof value === "object"
        ? Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolve(inner)]))
      : value;
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = resolve(figure);
      layout.font = { family: variable("--text"), size: 13, color: variable("--quiet") };
      layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
      layout.xaxis.title.font = { size: 12.5, color: variable("--quiet") };
      layout.yaxis.tickfont = { color: variable("--ink") };
      layout.hoverlabel = {
        bgcolor: variable("--card"), bordercolor: variable("--rule"),
        font: { family: variable("--text"), size: 13, color: variable("--ink") },
      };
      Plotly.react(id, data, layout, { displayModeBar: false, responsive: true, showTips: false });
    }
  };
  dark.addEventListener("change", draw);
  draw();
})();
