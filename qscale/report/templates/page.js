// The page's own behaviour: what-if panels and tables that sort. Without it the page reads as well.

function shown(value) {
  if (Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  const text = value.toPrecision(4);
  const size = Math.abs(value);
  if (value === 0 || (size >= 1e-3 && size < 1e4)) return String(Number(text));
  if (size >= 1e4 && size < 1e15) {
    const [unit, letter] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1, ""]].find(([u]) => size >= u);
    return String(Number((value / unit).toPrecision(4))) + letter;
  }
  return Number(text).toExponential().replace("e+", "e");
}

function startPanel(section) {
  const law = JSON.parse(section.querySelector("script").textContent);
  const find = (role, column) =>
    [...section.querySelectorAll(`[data-${role}]`)].find((e) => e.dataset[role] === column);
  const steps = 1000;
  const toSlider = ({ log, ends: [low, high] }, x) => {
    const share = log ? Math.log(x / low) / Math.log(high / low) : (x - low) / (high - low);
    return Math.round(steps * Math.min(Math.max(share, 0), 1));
  };
  const fromSlider = ({ log, ends: [low, high] }, step) => {
    const share = step / steps;
    const x = log ? low * (high / low) ** share : low + (high - low) * share;
    return Number(x.toPrecision(4));
  };
  const read = () => {
    const point = {};
    for (const { column, levels } of law.inputs) {
      const { value } = find("input", column);
      point[column] = levels ? value : value === "" ? NaN : Number(value);
    }
    return point;
  };
  const complete = (point) => {
    const whole = { ...point };
    for (const { column, times } of law.inputs) if (times) whole[column] *= whole[times];
    return whole;
  };
  const nowhere = Object.fromEntries(
    law.inputs.map(({ column, levels, start }) => [column, levels ? start : NaN]));
  const first = predict(law, complete(Object.fromEntries(
    law.inputs.map(({ column, start }) => [column, start])))).factors;
  const put = (name, value) => {
    const cell = find("output", name);
    if (!cell) return;
    cell.textContent = shown(value);
    cell.dataset.value = String(value);
  };
  const update = () => {
    const point = read();
    const refused = law.inputs.filter(({ column, plausible }) => plausible &&
      !(point[column] >= (plausible[0] ?? -Infinity) && point[column] <= (plausible[1] ?? Infinity)));
    const found = predict(law, complete(refused.length ? nowhere : point));
    put("median", found.median);
    put("perplexity", Math.exp(found.median));
    for (const [level, [low, high]] of Object.entries(found.intervals)) {
      put(`low_${level}`, low);
      put(`high_${level}`, high);
    }
    found.factors.forEach((value, i) => put(`factor_${i}`, law.link === "log"
      ? Math.exp(value - first[i]) : value - first[i]));
    const beyond = [];
    for (const { column, label, levels, low, high } of law.inputs) {
      const x = point[column];
      const outside = !levels && !(x >= low && x <= high);
      const note = find("note", column);
      if (note) note.classList.toggle("outside", outside);
      if (outside) beyond.push(label);
      find("input", column).setAttribute("aria-invalid",
        String(refused.some((each) => each.column === column)));
    }
    const warning = find("output", "warning");
    warning.hidden = beyond.length === 0 && Number.isFinite(found.median);
    const range = ({ label, plausible: [low, high] }) => `${label} must be a number` +
      (low === null ? "" : ` from ${shown(low)}`) + (high === null ? "" : ` to ${shown(high)}`);
    warning.textContent = refused.length ? `${refused.map(range).join(", ")}.`
      : Number.isNaN(found.median) ? "The law has no value here."
      : `Extrapolation: ${beyond.join(", ")} beyond the fitted rows. ` +
        "The interval does not cover a law that fails there.";
  };
  for (const each of law.inputs) {
    const input = find("input", each.column), slider = find("slider", each.column);
    input.addEventListener("input", () => {
      if (slider && input.value !== "") {
        slider.value = toSlider(each, Number(input.value));
        slider.setAttribute("aria-valuetext", shown(Number(input.value)));
      }
      update();
    });
    if (!slider) continue;
    slider.value = toSlider(each, each.start);
    slider.setAttribute("aria-valuetext", shown(each.start));
    slider.addEventListener("input", () => {
      input.value = fromSlider(each, Number(slider.value));
      slider.setAttribute("aria-valuetext", shown(Number(input.value)));
      update();
    });
  }
  find("reset", "all").addEventListener("click", () => {
    for (const each of law.inputs) {
      const input = find("input", each.column);
      input.value = each.start;
      input.dispatchEvent(new Event("input"));
    }
  });
  section.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  section.querySelector("form").hidden = false;
  update();
}

// Text as its number where it is one: thousands separators, infinities and dashes included.
function sortKey(cell) {
  const text = cell.dataset.sort === undefined ? cell.textContent.trim() : cell.dataset.sort;
  if (text === "–" || text === "") return null;
  if (/^-?∞$/.test(text)) return text.startsWith("-") ? -Infinity : Infinity;
  const [, digits, letter] = text.match(/^(.*?)([kMBT]?)$/);
  const size = { "": 1, k: 1e3, M: 1e6, B: 1e9, T: 1e12 }[letter];
  const value = size * Number(digits.replace(/,/g, "") || NaN);
  return Number.isNaN(value) ? text : value;
}

function before(a, b) {
  if (typeof a === typeof b) return typeof a === "string" ? a.localeCompare(b) : (a > b) - (a < b);
  return typeof a === "number" ? -1 : 1;
}

function startTable(table) {
  const body = table.tBodies[0];
  if (body.rows.length < 3) return;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const keyed = [...body.rows].map((row) => [sortKey(row.cells[column]), row]);
      // Cells without a value stay at the end whichever way the others run.
      keyed.sort(([a], [b]) => (a === null || b === null
        ? (a === null) - (b === null) : sign * before(a, b)));
      body.append(...keyed.map(([, row]) => row));
    });
  });
}

document.querySelectorAll("section.panel").forEach(startPanel);
document.querySelectorAll("table.data").forEach(startTable);
