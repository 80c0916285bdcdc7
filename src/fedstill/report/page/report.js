"use strict";
(() => {
  let page = JSON.parse(document.getElementById("content").textContent);
  const state = { hidden: new Set(), client: "", metric: "accuracy", by: "round", logged: "", sort: null,
    matrix: 0, confused: 0, model: "", pictured: null, stage: null, reach: null, recipe: 0, view: "said" };
  const NONE = "–";

  // Elements are made here alone, and their content is always text.
  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(element.style, value);
      else if (name === "value") element.value = value;
      else element.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }
  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  // Amounts as people read them.
  function human(value, unit) {
    const steps = ["", "k", "M", "G", "T", "P"];
    let step = 0;
    while (Math.abs(value) >= 999.5 && step < steps.length - 1) { value /= 1000; step += 1; }
    const digits = Math.abs(value) >= 99.95 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
    return `${digits} ${steps[step]}${unit}`.trim();
  }
  const bytes = (value) => human(value, "B");
  const short = (value) => (Math.abs(value) >= 1000 ? human(value, "") : String(Number(Number(value).toPrecision(4))));
  function clock(seconds) {
    if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
    const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    const hours = Math.floor(whole / 3600);
    return hours ? `${hours}:${two(Math.floor(whole / 60) % 60)} h` : `${Math.floor(whole / 60)}:${two(whole % 60)} min`;
  }
  const percent = (value, digits = 2) => (value === null || value === undefined ? NONE : (100 * value).toFixed(digits));
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

  const COLOURS = 7, DASHES = ["", "7 4", "2 3", "9 3 2 3"];
  const colour = (number) => `var(--c${number % COLOURS})`;
  const dash = (number) => DASHES[Math.floor(number / COLOURS) % DASHES.length];
  const visible = () => page.methods.map((method, number) => ({ method, number })).filter(({ method }) => !state.hidden.has(method.name));
  const runsOf = (number) => page.runs.map((run, place) => ({ ...run, place })).filter((run) => run.method === number);
  const score = (method) => (method.main && method.scores[method.main]) || null;
  const lowerIsBetter = (metric) => /loss|error|brier/.test(metric);
  function mean(values) { return values.reduce((sum, value) => sum + value, 0) / values.length; }
  function spread(values) {
    if (values.length < 2) return 0;
    const middle = mean(values);
    return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
  }
  const lookup = (series) => new Map((series ? series[0] : []).map((round, place) => [round, series[1][place]]));
  const sent = (method) => Object.values(method.bytes).reduce((sum, value) => sum + (value ? value[0] : 0), 0);
  const classNames = (method) => {
    const run = runsOf(method).find((each) => each.partition !== null);
    return run ? page.partitions[run.partition].classes : [];
  };

  // Charts.
  function ticks(low, high, most) {
    const span = high - low || Math.abs(high) || 1;
    const raw = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
    return found;
  }
  function lineChart(place, series, options) {
    const drawn = series.filter((each) => each.points.length);
    if (!drawn.length) { place.replaceChildren(h("p", { class: "soft" }, "There is nothing to draw for this choice.")); return; }
    const width = Math.max(300, place.clientWidth || 900), narrow = width < 560;
    const height = narrow ? 270 : 360, left = 54, right = 14, top = 14, bottom = 44;
    const all = drawn.flatMap((each) => each.points);
    const xs = all.map((point) => point.x), ys = all.flatMap((point) => [point.y - point.spread, point.y + point.spread]);
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)], [y0, y1] = [Math.min(...ys), Math.max(...ys)];
    if (options.zero) x0 = 0;
    if (x0 === x1) { x0 = options.zero ? 0 : x0 - 1; x1 = x1 + (x1 === 0 ? 1 : options.zero ? x1 * 0.1 : 1); }
    const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
    y0 = options.floor !== undefined ? Math.max(options.floor, y0 - pad) : y0 - pad;
    y1 = options.ceiling !== undefined ? Math.min(options.ceiling, y1 + pad) : y1 + pad;
    const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
    const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label });
    for (const at of ticks(y0, y1, 6)) {
      svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: py(at), y2: py(at) }));
      svg.append(s("text", { x: left - 8, y: py(at) + 4, "text-anchor": "end" }, options.yText(at)));
    }
    for (const at of ticks(x0, x1, narrow ? 4 : 8)) {
      if (options.whole && !Number.isInteger(at)) continue;
      svg.append(s("line", { class: "axis", x1: px(at), x2: px(at), y1: height - bottom, y2: height - bottom + 4 }));
      svg.append(s("text", { x: px(at), y: height - bottom + 18, "text-anchor": "middle" }, options.xText(at)));
    }
    svg.append(s("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    svg.append(s("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, options.xName));
    for (const each of drawn) {
      if (each.points.some((point) => point.spread)) {
        const upper = each.points.map((point) => `${px(point.x)},${py(point.y + point.spread)}`);
        const lower = each.points.map((point) => `${px(point.x)},${py(point.y - point.spread)}`).reverse();
        svg.append(s("polygon", { points: [...upper, ...lower].join(" "), style: { fill: each.colour, opacity: 0.13 } }));
      }
      const path = each.points.map((point, number) => `${number ? "L" : "M"}${px(point.x).toFixed(1)},${py(point.y).toFixed(1)}`).join("");
      svg.append(s("path", { d: path, "data-series": each.name, "stroke-dasharray": each.dash,
        style: { fill: "none", stroke: each.colour, strokeWidth: 2.2, strokeLinejoin: "round" } }));
      if (each.points.length <= 30) {
        for (const point of each.points) svg.append(s("circle", { cx: px(point.x), cy: py(point.y), r: 2.8, style: { fill: each.colour } }));
      }
    }
    const cross = s("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    const dots = s("g", {});
    svg.append(cross, dots);
    const tip = h("div", { class: "tip", hidden: true });
    const hide = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); dots.replaceChildren(); };
    const show = (event) => {
      const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * width;
      const near = drawn.map((each) => ({ each, point: each.points.reduce((best, point) => (Math.abs(px(point.x) - at) < Math.abs(px(best.x) - at) ? point : best)) }));
      const middle = near.reduce((best, found) => (Math.abs(px(found.point.x) - at) < Math.abs(px(best.point.x) - at) ? found : best)).point.x;
      const shown = options.whole ? near.filter((found) => found.point.x === middle) : near;
      shown.sort((one, other) => other.point.y - one.point.y);
      cross.setAttribute("x1", px(middle)); cross.setAttribute("x2", px(middle)); cross.setAttribute("visibility", "visible");
      dots.replaceChildren(...shown.map(({ each, point }) => s("circle", { cx: px(point.x), cy: py(point.y), r: 4.5, style: { fill: each.colour, stroke: "var(--surface)", strokeWidth: 2 } })));
      tip.replaceChildren(
        h("div", { class: "soft" }, options.whole ? `${options.xName} ${options.xText(middle)}` : `near ${options.xText(middle)}`),
        ...shown.map(({ each, point }) => h("div", {}, h("i", { style: { background: each.colour } }), each.name,
          options.whole ? null : h("small", {}, ` ${options.xText(point.x)}`),
          h("b", {}, options.yText(point.y, true) + (point.spread ? ` ± ${options.yText(point.spread, true)}` : "")))));
      tip.hidden = false;
      const across = ((px(middle) / width) * box.width), room = box.width - across;
      tip.style.left = room > tip.offsetWidth + 20 ? `${across + 14}px` : `${Math.max(0, across - tip.offsetWidth - 14)}px`;
      tip.style.top = `${Math.max(0, Math.min(event.clientY - box.top - 20, box.height - tip.offsetHeight))}px`;
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
    place.replaceChildren(svg, tip, h("div", { class: "legend" }, drawn.map((each) =>
      h("span", {}, s("svg", { width: 26, height: 8, style: { width: "26px", flex: "none" } }, s("line", { x1: 0, x2: 26, y1: 4, y2: 4, "stroke-dasharray": each.dash, style: { stroke: each.colour, strokeWidth: 2.5 } })), each.name))));
  }

  // A curve of a method: means over its finished seeds (over all where none is) at the rounds that all of them have.
  function curve(number, valuesOf, by) {
    const all = runsOf(number), finished = all.filter((run) => run.status === "finished");
    const each = (finished.length ? finished : all).map((run) => ({ y: lookup(valuesOf(run)), x: by === "round" ? null : lookup(run[by]) })).filter((run) => run.y.size);
    if (!each.length) return [];
    const rounds = [...each[0].y.keys()].filter((round) => each.every((run) => run.y.has(round) && (run.x === null || run.x.has(round))));
    return rounds.map((round) => {
      const ys = each.map((run) => run.y.get(round));
      return { round, x: by === "round" ? round : mean(each.map((run) => run.x.get(round))), y: mean(ys), spread: spread(ys) };
    });
  }
  const AXES = {
    round: { title: "round", text: (x) => String(x) },
    bytes: { title: "bytes sent, each message once", text: bytes },
    heard: { title: "bytes received, by all who hear", text: bytes },
    floats: { title: "numbers sent", text: short },
    seconds: { title: "time of computing", text: clock },
    simulated: { title: "simulated time", text: clock },
  };
  const inPercent = (metric) => /accuracy|f1|auroc|recall/.test(metric);
  const scoreSeries = (metric, client) => (run) => {
    const found = run.metrics[metric];
    return !found ? null : client ? found.by[client] || found.by.everyone : found.mean;
  };

  // Small helpers for controls.
  function choice(name, options, value, change) {
    const box = h("select", { "aria-label": name, onchange: (event) => change(event.target.value) },
      options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)));
    return h("label", { class: "field" }, name, box);
  }
  function heatCell(value, share, text, attributes) {
    if (value === null || value === undefined) return h("td", { class: "none", title: "not measured" });
    const strength = Math.round(6 + 78 * Math.max(0, Math.min(1, share)));  // up to what --heat-ink can be read on
    return h("td", { ...attributes, style: { background: `color-mix(in srgb, var(--heat) ${strength}%, var(--surface))`, color: "var(--heat-ink)" } }, text);
  }
  function card(id, title, controls, ...children) {
    return h("section", { class: "card", id }, h("div", { class: "head" }, h("h2", {}, title), controls ? h("div", { class: "controls" }, controls) : null), children);
  }
  function tree(value) {
    if (value === null || value === undefined) return NONE;
    if (Array.isArray(value)) {
      if (!value.length) return NONE;
      if (value.every((each) => each && typeof each === "object" && !Array.isArray(each))) return rowsTable(value);
      const words = value.every((each) => typeof each !== "object" && !/[,;]/.test(String(each)));  // sentences stand in lines of their own
      return words ? value.map(cell).join(", ") : h("div", {}, value.map((each) => h("div", {}, tree(each))));
    }
    if (typeof value !== "object") return cell(value);
    return h("dl", { class: "tree" }, Object.entries(value).flatMap(([key, item]) => [h("dt", {}, key.replaceAll("_", " ")), h("dd", {}, tree(item))]));
  }
  function cell(value) {
    if (typeof value === "number") return Number.isInteger(value) ? value.toLocaleString("en") : short(value);
    return typeof value === "boolean" ? (value ? "yes" : "no") : value === null || value === undefined ? NONE : String(value);
  }
  // How the values of a column are written: short numbers all with as many digits behind the point.
  function alike(values) {
    const numbers = values.filter((value) => typeof value === "number");
    const digits = Math.max(0, ...numbers.map((value) => (String(value).split(".")[1] || "").length));
    const even = digits > 0 && digits <= 4 && numbers.every((value) => Math.abs(value) < 1000 && !String(value).includes("e"));
    return (value) => (even && typeof value === "number" ? value.toFixed(digits) : cell(value));
  }
  function rowsTable(rows) {
    const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    const text = columns.map((name) => rows.some((row) => typeof row[name] !== "number" && row[name] !== null));
    const written = columns.map((name) => alike(rows.map((row) => row[name])));
    return plainTable(columns.map((name) => name.replaceAll("_", " ")), rows.map((row) => columns.map((name, place) => (row[name] !== null && typeof row[name] === "object" ? JSON.stringify(row[name]) : written[place](row[name])))), text);
  }
  function plainTable(columns, rows, text) {
    return h("div", { class: "scroll" }, h("table", { class: "full" },
      h("thead", {}, h("tr", {}, columns.map((name, place) => h("th", { scope: "col", class: text && text[place] ? "text" : null }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((each, place) => h("td", { class: text && text[place] ? "text" : null }, each)))))));
  }

  // Sections.
  function overview() {
    if (!page.methods.length) return null;
    const shown = visible(), best = shown.filter(({ method }) => score(method)).sort((a, b) => score(b.method)[0] - score(a.method)[0])[0];
    const rounds = [...new Set(page.runs.map((run) => run.rounds))], networks = [...new Set(page.methods.flatMap((method) => Object.values(method.networks)))];
    const partition = page.partitions[0], examples = partition ? partition.counts.flat().reduce((sum, each) => sum + each, 0) : null;
    const fact = (value, what) => h("div", { class: "fact" }, h("b", {}, value), h("span", {}, what));
    const total = shown.reduce((sum, { method }) => sum + sent(method) * method.seeds.length, 0);
    const time = shown.reduce((sum, { method }) => sum + (method.seconds ? method.seconds[0] * method.seeds.length : 0), 0);
    return h("div", { class: "facts", id: "overview" },
      best ? fact(`${percent(score(best.method)[0])} %`, [`best ${words(best.method.main)}: `, best.method.name]) : null,
      fact(plural(shown.length, "method"), `${plural(page.runs.length, "run")} of ${rounds.join(" or ")} rounds, ${plural(new Set(page.runs.map((run) => run.seed)).size, "seed")}`),
      fact([...new Set(page.methods.map((method) => method.data))].join(", "), partition ? `${plural(partition.clients.length + (partition.more || 0), "client")}, ${plural(partition.classes.length, "class").replace("classs", "classes")}${examples ? `, ${examples.toLocaleString("en")} training examples` : ""}` : "data"),
      networks.length > 1 ? fact(plural(networks.length, "network"), networks.slice(0, 4).join("; ") + (networks.length > 4 ? "; …" : "")) : networks.length ? fact(networks[0], "network of every client") : null,
      fact(bytes(total), "sent in all runs shown"),
      time ? fact(clock(time), "of computing") : null);
  }
  const words = (name) => ({ average_accuracy: "average accuracy", averaged_global_accuracy: "accuracy of all models everywhere", averaged_local_accuracy: "accuracy of each model at home", inter_accuracy: "accuracy elsewhere" })[name] || name.replaceAll("_", " ");

  function results() {
    // Numbers stand in one table where data and kinds of network are the same.
    const setting = (method) => `${method.data} ${method.digest}, ${[...new Set(Object.values(method.networks))].sort().join(" and ") || "networks unknown"}`;
    const parts = [...new Set(page.methods.map(setting))].map((part) => {
      const members = page.methods.map((method, number) => ({ method, number })).filter(({ method }) => setting(method) === part);
      return [part, resultsTable(members)];
    });
    if (!page.methods.length) return null;
    const several = Math.max(...page.methods.map((method) => method.seeds.length)) > 1;
    const own = page.methods.some((method) => Object.keys(method.by_client).length);
    const crossed = page.methods.some((method) => method.scores.averaged_global_accuracy);
    const sources = [...new Set(page.methods.filter((method) => method.reported).map((method) => method.reported.source).filter(Boolean))];
    return card("results", "Results", null,
      h("div", { id: "results-table" }, parts.map(([part, table]) => [parts.length > 1 ? h("h3", {}, part) : null, table])),
      h("p", { class: "soft" }, "Accuracies in percent", several ? ", means over seeds ± sample standard deviation" : ", one seed", ". Bytes of all rounds, each message counted once. Click a heading to sort.",
        crossed ? " Where clients keep their own models, a column is the mean of all models on that test set; global: every model on every test set; inter: on the others’; local: on its own."
          : own ? " Where clients keep their own models, each is scored on its own test set alone; one common model is scored on all of them." : "",
        page.held_out ? " Scores are on training examples held out, not on the test set." : ""),
      sources.length ? h("p", { class: "soft" }, "Reported: ", sources.join("; ")) : null);
  }
  function resultsTable(members) {
    const targets = [...new Set(members.flatMap(({ method }) => Object.keys(method.targets)))];
    const own = members.some(({ method }) => Object.keys(method.by_client).length);
    const others = [...new Set(members.flatMap(({ method }) => Object.keys(method.others)))].filter((name) => !/^(recall|confusion)\./.test(name));
    const average = (name) => (method) => method.scores[name] || method.scores.average_accuracy;
    const columns = [];
    const add = (title, value, text, options) => columns.push({ title, value, text, ...options });
    if (targets.length <= 12) for (const name of targets) add(name, (method) => method.targets[name], null, { best: true, target: name, printed: (method) => method.reported && method.reported.targets[name] });
    else {
      const ends = (choose) => (method) => { const all = Object.values(method.targets).map((each) => each[0]); return all.length ? [choose(...all), null, 1] : null; };
      add("lowest", ends(Math.min), null, { best: true }); add("highest", ends(Math.max), null, { best: true });
    }
    if (own) {
      for (const [title, name] of [["global", "averaged_global_accuracy"], ["inter", "inter_accuracy"], ["local", "averaged_local_accuracy"]])
        if (members.some(({ method }) => method.scores[name])) add(title, average(name), null, { best: true, strong: true, printed: (method) => method.reported && method.reported.scores[name] });
    } else add("average", average("average_accuracy"), null, { best: true, strong: true });
    if (members.some(({ method }) => method.reported && method.reported.average !== null)) {
      add("reported", (method) => (method.reported && method.reported.average !== null ? [method.reported.average, null, 1] : null), null, {});
      add("ours − reported", (method) => { const ours = score(method); return ours && method.reported && method.reported.average !== null ? [ours[0] - method.reported.average, null, 1] : null; }, (value) => (value[0] > 0 ? "+" : value[0] < 0 ? "−" : "") + percent(Math.abs(value[0])), {});
    }
    for (const name of others) add(name.replaceAll("_", " "), (method) => method.others[name], (value) => short(value[0]) + (value[1] ? ` ± ${short(value[1])}` : ""), { best: true, low: lowerIsBetter(name) });
    for (const [way, title] of [["up", "up"], ["down", "down"], ["peer", "to peers"]]) if (members.some(({ method }) => method.bytes[way] && method.bytes[way][0])) add(`bytes ${title}`, (method) => method.bytes[way], (value) => bytes(value[0]), {});
    if (members.some(({ method }) => method.seconds && method.seconds[0])) add("time", (method) => method.seconds, (value) => clock(value[0]), {});
    add("seeds", (method) => [method.seeds.length, method.unfinished, 1], (value) => (value[1] ? `${value[0]}, ${value[1]} unfinished` : String(value[0])), {});
    const rank = state.sort && columns.find((column) => column.title === state.sort.title);
    const ordered = [...members];
    if (rank) ordered.sort((a, b) => { const [one, other] = [rank.value(a.method), rank.value(b.method)]; return (one && other ? one[0] - other[0] : one ? 1 : other ? -1 : 0) * (state.sort.down ? -1 : 1); });
    const best = columns.map((column) => {
      const values = members.filter(({ method }) => !state.hidden.has(method.name)).map(({ method }) => column.value(method)).filter(Boolean).map((value) => value[0]);
      return column.best && values.length > 1 ? Math[column.low ? "min" : "max"](...values) : null;
    });
    const click = (title) => () => { state.sort = { title, down: !(state.sort && state.sort.title === title && state.sort.down) }; render("results"); };
    const head = h("tr", {}, h("th", { scope: "col" }, "method"), columns.map((column) => h("th", { scope: "col", class: column.target && column.target === state.client ? "chosen" : null, "aria-sort": rank === column ? (state.sort.down ? "descending" : "ascending") : null }, h("button", { type: "button", onclick: click(column.title) }, column.title))));
    const body = ordered.map(({ method, number }) => h("tr", { class: state.hidden.has(method.name) ? "off" : null, "data-method": method.name },
      h("th", { scope: "row" }, h("span", { class: "swatch", style: { background: colour(number) } }), method.name),
      columns.map((column, place) => {
        const value = column.value(method), printed = column.printed && column.printed(method);
        const content = value ? (column.text ? column.text(value) : [percent(value[0]), value[1] ? h("small", {}, `± ${percent(value[1])}`) : null]) : NONE;
        const classes = [value && best[place] === value[0] ? "best" : "", column.target && column.target === state.client ? "chosen" : ""].filter(Boolean).join(" ");
        return h("td", { class: classes || null, title: printed ? `reported: ${percent(printed)}` : null }, content, printed && column.target ? h("small", {}, ` (${percent(printed)})`) : null);
      })));
    return h("div", { class: "scroll" }, h("table", { class: "full" }, h("thead", {}, head), h("tbody", {}, body)));
  }

  function curves() {
    const metrics = [...new Set(page.runs.flatMap((run) => Object.keys(run.metrics)))];
    if (!metrics.length) return null;
    if (!metrics.includes(state.metric)) state.metric = metrics[0];
    const place = h("div", { class: "chart", id: "curve-chart" });
    const controls = [
      choice("metric", metrics.map((name) => [name, name.replaceAll("_", " ")]), state.metric, (value) => { state.metric = value; render("curves"); }),
      choice("by", Object.entries(AXES).filter(([key]) => key !== "simulated" || page.runs.some((run) => run.simulated[0].length)).map(([key, axis]) => [key, axis.title]), state.by, (value) => { state.by = value; render("curves"); }),
    ];
    const where = state.client ? `on the test set of ${state.client}: the common model, or the client’s own` : "mean over test sets";
    const made = card("curves", "Along the run", controls, h("p", { class: "soft" }, `${state.metric.replaceAll("_", " ")}, ${where}`), place);
    const whole = state.by === "round", rate = inPercent(state.metric);
    later(() => lineChart(place, visible().map(({ method, number }) => ({ name: method.name, colour: colour(number), dash: dash(number), points: curve(number, scoreSeries(state.metric, state.client), state.by) })), {
      label: `${state.metric} by ${AXES[state.by].title}`, whole, zero: !whole, xName: AXES[state.by].title, xText: AXES[state.by].text,
      yText: (y, exact) => (rate ? `${exact ? percent(y) : short(100 * y)} %` : short(y)), floor: rate ? 0 : undefined, ceiling: rate ? 1.005 : undefined }));
    return made;
  }

  function reaching() {
    const each = visible().map(({ method, number }) => ({ method, number, by: Object.fromEntries(["round", "bytes", "seconds"].map((axis) => [axis, curve(number, scoreSeries("accuracy", state.client), axis)])) })).filter((found) => found.by.round.length);
    if (!each.length) return null;
    const most = Math.max(...each.flatMap((found) => found.by.round.map((point) => point.y)));
    const least = Math.min(...each.flatMap((found) => found.by.round.map((point) => point.y)));
    const ends = each.map((found) => Math.max(...found.by.round.map((point) => point.y))).sort((a, b) => a - b);
    if (state.reach === null) state.reach = Math.floor(100 * ends[Math.floor((ends.length - 1) / 2)]) / 100;
    const body = h("div", { class: "scroll", id: "reach-table" });
    const output = h("output", { id: "reach-value" });
    const draw = () => {
      output.textContent = `${Math.round(100 * state.reach)} %`;
      const rows = each.map((found) => ({ ...found, at: found.by.round.findIndex((point) => point.y >= state.reach) }));
      const top = Math.max(1, ...rows.filter((row) => row.at >= 0).map((row) => row.by.bytes[row.at] ? row.by.bytes[row.at].x : 0));
      body.replaceChildren(h("table", { class: "full" }, h("thead", {}, h("tr", {}, ["method", "first round", "time", "bytes sent"].map((name) => h("th", { scope: "col" }, name)), h("td", {}))),
        h("tbody", {}, rows.map((row) => {
          const name = h("th", { scope: "row" }, h("span", { class: "swatch", style: { background: colour(row.number) } }), row.method.name);
          if (row.at < 0) return h("tr", {}, name, h("td", { colspan: 4, class: "text soft" }, `not reached; best ${percent(Math.max(...row.by.round.map((point) => point.y)))} %`));
          const cost = row.by.bytes[row.at] ? row.by.bytes[row.at].x : 0;
          return h("tr", {}, name, h("td", {}, row.by.round[row.at].round), h("td", {}, row.by.seconds[row.at] ? clock(row.by.seconds[row.at].x) : NONE), h("td", {}, bytes(cost)),
            h("td", { style: { width: "35%" } }, h("div", { class: "progress" }, h("i", { style: { width: `${(100 * cost) / top}%`, background: colour(row.number) } }))));
        }))));
    };
    const slider = h("input", { type: "range", min: Math.ceil(100 * least), max: Math.floor(100 * most), step: 1, value: Math.round(100 * state.reach), id: "reach", "aria-label": "accuracy to reach", oninput: (event) => { state.reach = Number(event.target.value) / 100; draw(); } });
    draw();
    return card("cost", "What an accuracy costs", null, h("div", { class: "slider" }, h("label", { for: "reach", class: "soft" }, "accuracy to reach"), slider, output), body);
  }

  function byClient() {
    const targets = page.clients.filter((name) => name !== "everyone");
    if (targets.length < 2 || targets.length > 60) return null;
    const shown = visible().map(({ method }) => ({ method, own: method.by_client.averaged_local_accuracy || method.targets }));
    const values = shown.flatMap(({ own }) => targets.map((name) => own[name] && own[name][0])).filter((value) => value !== undefined && value !== null);
    if (!values.length || new Set(shown.flatMap(({ own }) => targets.map((name) => (own[name] || [])[0]))).size <= shown.length) return null;
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const chosen = (name) => (name === state.client ? "chosen" : null);
    const cellOf = ({ method, own }, name) => { const value = own[name] && own[name][0]; return heatCell(value, (value - low) / (high - low || 1), percent(value, 1), { title: `${method.name} at ${name}: ${percent(value)} %` }); };
    // Many clients stand below each other: beside each other they would be cut off in print.
    const many = targets.length > 12;
    const head = many ? shown.map(({ method }) => h("th", { scope: "col" }, method.name)) : targets.map((name) => h("th", { scope: "col", class: chosen(name) }, name));
    const body = many ? targets.map((name) => h("tr", {}, h("th", { scope: "row", class: `side ${chosen(name) || ""}` }, name), shown.map((each) => cellOf(each, name))))
      : shown.map((each) => h("tr", {}, h("th", { scope: "row", class: "side" }, each.method.name), targets.map((name) => cellOf(each, name))));
    const made = card("clients", "Client by client", null, h("p", { class: "soft" }, "What each client has in the end on its own test set: the common model, or its own."),
      h("div", { class: "scroll" }, h("table", { class: "heat" }, h("thead", {}, h("tr", {}, h("td", {}), head)), h("tbody", {}, body))));
    if (many) made.classList.add("long");
    return made;
  }

  function matrices() {
    const able = visible().filter(({ method }) => method.matrix);
    if (!able.length) return null;
    const chosen = able.find(({ number }) => number === Number(state.matrix)) || able[0], { matrix, networks, name } = chosen.method;
    const values = matrix.values.flat().filter((value) => value !== null), [low, high] = [Math.min(...values), Math.max(...values)];
    const small = matrix.targets.length > 20;
    return card("matrix", "Every model on every test set", choice("method", able.map(({ method, number }) => [number, method.name]), chosen.number, (value) => { state.matrix = value; render("matrix"); }),
      h("p", { class: "soft" }, `${name}: accuracy in percent; a row is a client’s model, a column a client’s test set, its own is framed.`),
      h("div", { class: "scroll" }, h("table", { class: small ? "heat small" : "heat", id: "matrix-table" }, h("thead", {}, h("tr", {}, h("td", {}), matrix.targets.map((target) => h("th", { scope: "col" }, small ? "" : target)))),
        h("tbody", {}, matrix.models.map((model, row) => h("tr", {}, h("th", { scope: "row", class: "side" }, model, networks[model] ? h("small", {}, ` ${networks[model]}`) : null),
          matrix.targets.map((target, column) => { const value = matrix.values[row][column]; return heatCell(value, (value - low) / (high - low || 1), percent(value, 1), { class: model === target ? "own" : null, title: `model of ${model} on ${target}: ${percent(value)} %` }); })))))));
  }

  function confusions() {
    const able = visible().filter(({ method }) => Object.keys(method.by_class.confusion || {}).length || Object.keys(method.by_class.recall || {}).length);
    if (!able.length) return null;
    const chosen = able.find(({ number }) => number === Number(state.confused)) || able[0], found = chosen.method.by_class;
    const models = [...new Set([...Object.keys(found.confusion || {}), ...Object.keys(found.recall || {})])];
    if (!models.includes(state.model)) state.model = models[0];
    const triples = (found.confusion || {})[state.model], named = classNames(chosen.number);
    const size = Math.max(named.length, ...(triples || []).map(([t, a]) => Math.max(t, a) + 1), ...Object.keys((found.recall || {})[state.model] || {}).map((each) => Number(each) + 1));
    const names = Array.from({ length: size }, (_, number) => named[number] || String(number));
    const controls = [choice("method", able.map(({ method, number }) => [number, method.name]), chosen.number, (value) => { state.confused = value; render("confusion"); }),
      models.length > 1 || models[0] !== "server" ? choice("model of", models.map((each) => [each, each]), state.model, (value) => { state.model = value; render("confusion"); }) : null];
    const sums = names.map(() => 0), right = names.map(() => 0), table = names.map(() => names.map(() => 0));
    for (const [t, a, count] of triples || []) { table[t][a] += count; sums[t] += count; if (t === a) right[t] += count; }
    const recall = names.map((_, number) => (triples ? (sums[number] ? right[number] / sums[number] : null) : ((found.recall || {})[state.model] || {})[number] ?? null));
    const small = size > 20;
    const grid = triples ? h("div", { class: "scroll" }, h("table", { class: small ? "heat small" : "heat", id: "confusion-table" }, h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "side" }, "class ↓ answer →"), names.map((name) => h("th", { scope: "col" }, small ? "" : name)))),
      h("tbody", {}, names.map((name, row) => h("tr", {}, h("th", { scope: "row", class: "side" }, name), table[row].map((count, column) => heatCell(sums[row] ? count : null, count / (sums[row] || 1), count || "", { class: row === column ? "own" : null, title: `${count} of ${sums[row]} examples of ${name} taken for ${names[column]}` }))))))) : null;
    const bars = h("div", { class: "bars", id: "recall-bars" }, names.map((name, number) => [h("span", { class: "name" }, name), h("span", { class: "track" }, h("i", { style: { width: `${100 * (recall[number] || 0)}%`, background: colour(chosen.number) } })), h("span", { class: "amount" }, recall[number] === null ? NONE : `${percent(recall[number], 1)} %`)]));
    return card("confusion", "Class by class", controls, h("p", { class: "soft" }, `Round ${found.round}, the last seed, all test sets together${triples ? "; a row is the truth, a column the answer" : ""}.`),
      h("div", { class: "two" }, grid ? h("div", {}, h("h3", {}, "Confusions"), grid) : null, h("div", {}, h("h3", {}, "Recall: the share of a class that is found"), bars)));
  }

  function gallery() {
    const able = visible().filter(({ number }) => page.images.shown.some((image) => page.runs[image.run].method === number));
    if (!able.length) return null;
    const chosen = able.find(({ number }) => number === Number(state.pictured)) || able[0];
    const own = page.images.shown.filter((image) => page.runs[image.run].method === chosen.number), run = Math.min(...own.map((image) => image.run));
    const images = own.filter((image) => image.run === run), rounds = [...new Set(images.map((image) => image.round))].sort((a, b) => a - b);
    if (state.stage === null || state.stage > rounds.length - 1) state.stage = rounds.length - 1;
    const place = h("div", { class: "gallery", id: "gallery" }), output = h("output", { id: "stage-value" }), named = classNames(chosen.number);
    const draw = () => {
      const round = rounds[state.stage];
      output.textContent = `round ${round}`;
      const order = images.filter((image) => image.round === round && (!state.client || image.node === state.client || image.node === "server"));
      place.replaceChildren(...(order.length ? order.map((image) => mosaic(image, named)) : [h("p", { class: "soft" }, "No images of this client in this round.")]));
    };
    draw();
    const controls = [able.length > 1 ? choice("method", able.map(({ method, number }) => [number, method.name]), chosen.number, (value) => { state.pictured = value; state.stage = null; render("images"); }) : null];
    return card("images", "Synthetic images", controls,
      h("p", { class: "soft" }, `${chosen.method.name}: what was sent or is held instead of data, seed ${page.runs[run].seed}; a row is a class.`, page.images.left_out ? ` ${plural(page.images.left_out, "picture")} left out to keep this file small.` : ""),
      rounds.length > 1 ? h("div", { class: "slider" }, h("label", { for: "stage", class: "soft" }, "round"), h("input", { type: "range", id: "stage", min: 0, max: rounds.length - 1, step: 1, value: state.stage, "aria-label": "round of the images", oninput: (event) => { state.stage = Number(event.target.value); draw(); } }), output) : null, place);
  }
  function mosaic(image, named) {
    const [width, height] = image.size, gap = Math.max(1, Math.round(height / 16)), zoom = Math.max(1, Math.round(34 / height));
    const canvas = h("canvas", { width: image.count * (width + gap) - gap, height: image.classes * (height + gap), role: "img", "aria-label": `synthetic images of ${image.node}, round ${image.round}` });
    canvas.style.width = `${canvas.width * zoom}px`;
    canvas.style.height = `${canvas.height * zoom}px`;
    const picture = new Image();
    picture.onload = () => {
      const pen = canvas.getContext("2d");
      image.there.forEach((row, c) => [...row].forEach((there, i) => { if (there === "1") pen.drawImage(picture, i * width, c * height, width, height, i * (width + gap), c * (height + gap), width, height); }));
      canvas.dataset.drawn = "true";
    };
    picture.src = `data:image/png;base64,${image.png}`;
    const labels = h("div", { class: "classes" }, image.there.map((row, number) => h("span", { style: { height: `${(height + gap) * zoom}px` } }, named[number] || number)));
    return h("figure", {}, h("figcaption", {}, image.node), h("div", { class: "scroll" }, h("div", { class: "mosaic" }, labels, canvas)));
  }

  function traffic() {
    const shown = visible().filter(({ method }) => method.traffic.length);
    if (!shown.length) return null;
    const ways = { up: "to the server", down: "from the server", peer: "to peers" };
    const count = (row) => row[state.view];
    const totals = shown.map(({ method }) => method.traffic.reduce((sum, row) => sum + count(row), 0)), most = Math.max(...totals, 1);
    const bars = h("div", { class: "bars", id: "traffic-bars" }, shown.map(({ method, number }, place) => [h("span", { class: "name" }, method.name),
      h("span", { class: "track" }, Object.keys(ways).map((way, shade) => { const part = method.traffic.filter((row) => row.direction === way).reduce((sum, row) => sum + count(row), 0); return part ? h("i", { title: `${ways[way]}: ${bytes(part)}`, style: { width: `${(100 * part) / most}%`, background: colour(number), opacity: [1, 0.55, 0.8][shade] } }) : null; })),
      h("span", { class: "amount" }, bytes(totals[place]))]));
    const rows = shown.flatMap(({ method }) => [...method.traffic].sort((a, b) => b.said - a.said).map((row) => [method.name, ways[row.direction] || row.direction, row.step, row.field, short(row.messages), short(row.floats), bytes(row.said), bytes(row.heard)]));
    const controls = choice("count", [["said", "each message once"], ["heard", "once for each receiver"]], state.view, (value) => { state.view = value; render("traffic"); });
    return card("traffic", "What travelled", controls, h("p", { class: "soft" }, "Bytes of a whole run; full colour to the server, paler from it. By field of each message below."), bars,
      h("details", { open: rows.length <= 16 }, h("summary", {}, "by field"), plainTable(["method", "way", "step", "field", "messages", "numbers", "bytes sent", "bytes received"], rows, [true, true, true, true])));
  }

  function partition() {
    if (!page.partitions.length) return null;
    const first = page.runs.find((run) => run.partition !== null && !state.hidden.has(page.methods[run.method].name)) || page.runs.find((run) => run.partition !== null);
    const { clients, classes, counts, more } = page.partitions[first.partition], most = Math.max(1, ...counts.flat()), small = classes.length > 24 || clients.length > 40;
    return card("partition", "Who holds what", null, h("p", { class: "soft" }, "Training examples by client and class", more ? `; the first ${clients.length} of ${clients.length + more} clients` : "", page.partitions.length > 1 ? `; that of ${page.methods[first.method].name}, seed ${first.seed}` : "", "."),
      h("div", { class: "scroll" }, h("table", { class: small ? "heat small" : "heat", id: "partition-table" }, h("thead", {}, h("tr", {}, h("td", {}), classes.map((name) => h("th", { scope: "col" }, small ? "" : name)), h("th", { scope: "col" }, "total"))),
        h("tbody", {}, clients.map((client, row) => (state.client && clients.includes(state.client) && client !== state.client ? null : h("tr", {}, h("th", { scope: "row", class: "side" }, client), counts[row].map((count, column) => heatCell(count || null, Math.sqrt(count / most), count.toLocaleString("en"), { title: `${client}, class ${classes[column]}: ${count}` })), h("th", { class: "side" }, counts[row].reduce((sum, each) => sum + each, 0).toLocaleString("en")))))))));
  }

  function training() {
    const names = [...new Set(visible().flatMap(({ number }) => runsOf(number).flatMap((run) => Object.keys(run.logged))))];
    if (!names.length) return null;
    if (!names.includes(state.logged)) state.logged = names[0];
    const place = h("div", { class: "chart", id: "logged-chart" });
    later(() => lineChart(place, visible().map(({ method, number }) => ({ name: method.name, colour: colour(number), dash: dash(number), points: curve(number, (run) => run.logged[state.logged], "round") })), { label: state.logged, whole: true, xName: "round", xText: String, yText: (y) => short(y) }));
    return card("training", "What training logged", choice("number", names.map((name) => [name, name]), state.logged, (value) => { state.logged = value; render("training"); }), h("p", { class: "soft" }, "The mean over those who logged it; numbers of different methods need not mean the same."), place);
  }

  function shifts() {
    if (!page.shifts.length) return null;
    return card("shift", "How different the clients’ data are", null, page.shifts.map(({ folder, content }) => {
      const maps = Array.isArray(content.maps) ? content.maps : [], clients = [...new Set(maps.flatMap((map) => (map.points || []).map((point) => String(point[2]))))];
      return [page.shifts.length > 1 ? h("h3", {}, folder) : null, h("div", { class: "two" }, maps.map((map) => scatter(map, clients))),
        clients.length ? h("div", { class: "legend" }, clients.map((client, number) => h("span", {}, h("span", { class: "swatch", style: { background: colour(number), margin: 0 } }), client))) : null,
        Array.isArray(content.pairs) ? h("details", { open: content.pairs.length <= 12 }, h("summary", {}, "distances of every two clients"), rowsTable(content.pairs)) : null];
    }));
  }
  function scatter(map, clients) {
    const size = 420, points = (map.points || []).filter((point) => Number.isFinite(point[0]) && Number.isFinite(point[1]));
    const [xs, ys] = [points.map((point) => point[0]), points.map((point) => point[1])], [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const at = (value, low, high) => 12 + ((value - low) / (high - low || 1)) * (size - 24);
    return h("figure", { style: { margin: 0 } }, h("figcaption", {}, h("b", {}, map.title || "")), s("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": map.title || "map", style: { width: "100%" } },
      points.map((point) => s("circle", { cx: at(point[0], x0, x1), cy: size - at(point[1], y0, y1), r: 5, style: { fill: colour(clients.indexOf(String(point[2]))), opacity: 0.6 } }, s("title", {}, `${point[2]}, class ${point[3]}`)))));
  }

  function privacy() {
    const told = visible().filter(({ method }) => Object.keys(method.privacy).length), notes = page.runs.flatMap((run) => run.notes.filter((note) => note[1] === "privacy"));
    if (!told.length && !page.audits.length && !notes.length) return null;
    return card("privacy", "Privacy", null, told.map(({ method }) => [h("h3", {}, method.name), method.privacy.summary ? tree(method.privacy.summary) : null,
      method.privacy.ledger ? h("details", { open: method.privacy.ledger.rows.length <= 12 }, h("summary", {}, `ledger: ${plural(method.privacy.ledger.rows.length + method.privacy.ledger.left_out, "entry").replace("entrys", "entries")}`), plainTable(method.privacy.ledger.columns, method.privacy.ledger.rows, method.privacy.ledger.columns.map(() => true))) : null]),
      page.audits.length ? [h("h3", {}, "Audits"), page.audits.map(({ folder, content }) => h("div", { class: "audit" }, h("p", { class: "soft" }, folder), tree(content)))] : null);
  }

  function notes() {
    const warn = new Set(["warning", "lost", "left out", "absent", "skipped", "undefined"]), found = new Map();
    for (const run of page.runs) {
      if (state.hidden.has(page.methods[run.method].name)) continue;
      for (const [round, kind, node, text] of run.notes) {
        if (kind === "privacy") continue;
        const key = `${kind} ${node} ${text}`;
        if (!found.has(key)) found.set(key, { kind, node, text, round, who: new Set(), times: 0 });
        const note = found.get(key);
        note.who.add(page.methods[run.method].name); note.times += 1;
      }
    }
    const all = [...found.values()].sort((a, b) => warn.has(b.kind) - warn.has(a.kind));
    if (!all.length && !page.remarks.length) return null;
    const line = (note) => h("div", { class: warn.has(note.kind) ? "note warn" : "note" }, h("b", {}, note.kind), note.node ? ` ${note.node}` : "", ": ", note.text, h("small", {}, ` ${note.who.size === page.methods.length && page.methods.length > 1 ? "all methods" : [...note.who].join(", ")}${note.round ? `, round ${note.round}` : ""}`));
    return card("notes", "Notes and warnings", null, page.remarks.map((text) => h("div", { class: "note warn" }, text)), all.slice(0, 40).map(line), all.length > 40 ? h("details", {}, h("summary", {}, `${all.length - 40} more`), all.slice(40).map(line)) : null);
  }

  function origin() {
    const kinds = new Map();
    for (const run of page.runs) { const key = JSON.stringify(run.environment); if (!kinds.has(key)) kinds.set(key, { environment: run.environment, runs: 0 }); kinds.get(key).runs += 1; }
    const recipes = page.recipes.map((recipe, number) => ({ recipe, number, runs: page.runs.filter((run) => run.recipe === number) }));
    const chosen = recipes.find(({ number }) => number === Number(state.recipe)) || recipes[0];
    const text = h("pre", { id: "recipe-text", tabindex: 0 }, chosen ? chosen.recipe.text : "");
    const button = h("button", { type: "button", id: "copy", onclick: () => copy(text, button) }, "copy");
    if (!page.runs.length) return null;
    const made = card("origin", "Where the numbers come from", null, h("h3", {}, "Versions and machine"), [...kinds.values()].map(({ environment, runs }) => [kinds.size > 1 ? h("p", { class: "soft" }, plural(runs, "run")) : null, tree(environment)]),
      h("h3", {}, "Runs"), h("details", { open: page.runs.length <= 8 }, h("summary", {}, plural(page.runs.length, "folder")), plainTable(["folder", "method", "seed", "status", "rounds"], page.runs.map((run) => [run.folder, page.methods[run.method].name, run.seed, run.status, `${run.done} of ${run.rounds}`]), [true, true, false, true])),
      chosen ? [h("h3", {}, chosen.recipe.file), h("div", { class: "controls" }, choice("run", recipes.map(({ number, runs }) => [number, runs.length ? `${page.methods[runs[0].method].name} seed ${runs[0].seed}` : String(number)]), chosen.number, (value) => { state.recipe = value; render("origin"); }), button), text] : null);
    made.classList.add("long");
    return made;
  }
  async function copy(element, button) {
    try { await navigator.clipboard.writeText(element.textContent); } catch {
      const range = document.createRange(); range.selectNodeContents(element);
      const selection = window.getSelection(); selection.removeAllRanges(); selection.addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  }

  function progress() {
    const open = page.runs.filter((run) => run.status !== "finished");
    if (!page.runs.length || (!page.live && !open.length)) return null;
    const rows = page.runs.map((run) => {
      const accuracy = run.metrics.accuracy && run.metrics.accuracy.mean[1].at(-1), spent = run.seconds[1].at(-1) || 0;
      const left = run.status === "finished" ? "finished" : run.done && run.rounds ? `${clock((spent / run.done) * (run.rounds - run.done))} left` : "begun";
      const losses = Object.entries(run.logged).map(([name, series]) => `${name} ${short(series[1].at(-1))}`).slice(0, 2).join(" · ");
      return h("tr", { class: state.hidden.has(page.methods[run.method].name) ? "off" : null }, h("th", { scope: "row" }, h("span", { class: "swatch", style: { background: colour(run.method) } }), page.methods[run.method].name, h("small", {}, ` seed ${run.seed}`)),
        h("td", {}, h("div", { class: "progress" }, h("i", { style: { width: `${run.rounds ? (100 * run.done) / run.rounds : 0}%`, background: colour(run.method) } }))), h("td", {}, `${run.done} / ${run.rounds}`), h("td", {}, accuracy === undefined ? NONE : `${percent(accuracy)} %`), h("td", {}, bytes(run.bytes[1].at(-1) || 0)), h("td", { class: "text soft" }, losses || NONE), h("td", {}, left));
    });
    return card("progress", page.live ? "Runs, as they go" : "Progress", null, h("div", { class: "scroll" }, h("table", { class: "full" }, h("thead", {}, h("tr", {}, ["run", "", "rounds", "accuracy", "sent", "latest losses", "state"].map((name, place) => h(name ? "th" : "td", { scope: name ? "col" : null, class: place === 5 ? "text" : null }, name)))), h("tbody", {}, rows))));
  }

  // The page as a whole.
  const SECTIONS = { progress: ["Progress", progress], overview: [null, overview], results: ["Results", results], curves: ["Curves", curves], cost: ["Cost", reaching], clients: ["Clients", byClient], matrix: ["Cross accuracy", matrices], confusion: ["Classes", confusions], images: ["Images", gallery], traffic: ["Traffic", traffic], training: ["Training", training], partition: ["Partition", partition], shift: ["Shift", shifts], privacy: ["Privacy", privacy], notes: ["Notes", notes], origin: ["Origin", origin] };
  let pending = [];
  const later = (work) => pending.push(work);
  function settle() { const work = pending; pending = []; for (const each of work) each(); }

  function header() {
    const done = page.runs.filter((run) => run.status === "finished").length, names = page.methods.map((method) => method.name);
    return h("header", { class: "top" }, h("div", { class: "wide" }, h("p", { class: "eyebrow" }, page.live ? "fedstill · live" : "fedstill · report"), h("h1", {}, page.title), page.about.note ? h("p", { class: "lead" }, page.about.note) : null,
      h("p", { class: "soft" }, page.about.source ? `Source: ${page.about.source}. ` : "", `${names.length > 6 ? `${names.length} methods` : names.join(", ")}. Made ${page.made} by fedstill ${page.version} from ${page.folder}.`),
      h("div", { class: "pills" }, h("span", { class: done === page.runs.length ? "pill good" : "pill warn" }, done === page.runs.length ? `${plural(done, "run")} finished` : `${done} of ${plural(page.runs.length, "run")} finished`), page.held_out ? h("span", { class: "pill warn" }, "scored on held-out training examples") : null,
        page.remarks.length ? h("span", { class: "pill warn" }, plural(page.remarks.length, "remark")) : null)));
  }
  function bar() {
    const chips = page.methods.map((method, number) => h("button", { type: "button", class: "chip", "data-method": method.name, "aria-pressed": String(!state.hidden.has(method.name)), onclick: (event) => {
      if (state.hidden.has(method.name)) state.hidden.delete(method.name); else if (state.hidden.size < page.methods.length - 1) state.hidden.add(method.name);
      event.currentTarget.setAttribute("aria-pressed", String(!state.hidden.has(method.name))); renderAll(); } }, h("i", { style: { background: colour(number) } }), method.name));
    const clients = page.clients.filter((name) => name !== "everyone");
    const theme = h("button", { type: "button", id: "theme", "aria-label": "light or dark", onclick: () => { setTheme(root.dataset.theme === "dark" ? "light" : "dark"); } }, "◐");
    return h("div", { class: "bar" }, h("div", { class: "wide" }, h("div", { class: "chips" }, chips), h("div", { class: "right" }, clients.length > 1 ? choice("client", [["", "all clients"], ...clients.map((name) => [name, name])], state.client, (value) => { state.client = value; renderAll(); }) : null, theme),
      h("nav", { class: "toc", "aria-label": "sections" })));
  }
  const root = document.documentElement;
  const setTheme = (theme) => { root.dataset.theme = theme; };
  const holders = {};
  function render(name) {
    const made = SECTIONS[name][1]() || h("div", { hidden: true });
    made.dataset.section = name;
    holders[name].replaceWith(made);
    holders[name] = made;
    settle();
    pair();
  }
  // Two narrow tables that follow each other stand side by side where there is room.
  function pair() {
    const narrow = (made) => !made.hidden && NARROW.has(made.dataset.section) && Math.max(0, ...[...made.querySelectorAll("tr")].map((row) => row.children.length)) <= 12;
    const shown = Object.values(holders).filter((made) => !made.hidden);
    for (const made of shown) made.classList.remove("half");
    for (let place = 0; place < shown.length - 1; place += 1) {
      if (narrow(shown[place]) && narrow(shown[place + 1])) { shown[place].classList.add("half"); shown[place + 1].classList.add("half"); place += 1; }
    }
  }
  const NARROW = new Set(["clients", "matrix", "cost", "partition"]);
  function renderAll() { for (const name of Object.keys(SECTIONS)) render(name); contents(); }
  function contents() {
    const nav = document.querySelector("nav.toc");
    nav.replaceChildren(...Object.entries(SECTIONS).filter(([name, [title]]) => title && !holders[name].hidden).map(([name, [title]]) => h("a", { href: `#${name}` }, title)));
  }
  function build() {
    const main = h("main", { class: "wide" });
    for (const name of Object.keys(SECTIONS)) { holders[name] = h("div", {}); main.append(holders[name]); }
    const old = document.getElementById("page");
    const whole = h("div", { id: "page" }, header(), bar(), main, h("footer", {}, h("div", { class: "wide" }, `fedstill ${page.version}. This file holds everything it shows and asks no other host.`)));
    if (old) old.replaceWith(whole); else document.body.append(whole);
    renderAll();
  }
  setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  build();
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; render("curves"); render("training"); } });

  if (page.live) {
    let mark = "";
    const ask = async () => {
      try {
        const answer = await fetch("content.json", { headers: mark ? { "If-None-Match": mark } : {} });
        if (answer.status === 200) {
          const next = await answer.json();
          mark = answer.headers.get("ETag") || "";
          const top = window.scrollY, busy = document.activeElement && document.activeElement.tagName === "SELECT";
          if (!busy) { page = { ...next, live: true }; build(); window.scrollTo(0, top); }
        }
        document.body.dataset.connection = "open";
      } catch { document.body.dataset.connection = "closed"; }
      setTimeout(ask, 2000);
    };
    setTimeout(ask, 500);
  }
  document.body.dataset.ready = "true";
})();
