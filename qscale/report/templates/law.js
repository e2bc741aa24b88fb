// Evaluates a fitted law as Python does: its expression tree with gradient, then the interval.

// A number with its gradient in the parameters, null where it has none.
function combine(value, parts, slopes) {
  let gradient = null;
  parts.forEach(([, own], i) => {
    if (own === null) return;
    gradient = gradient || new Array(own.length).fill(0);
    own.forEach((x, j) => { gradient[j] += slopes[i] * x; });
  });
  return [value, gradient];
}

function evaluate([kind, ...rest], theta, point) {
  switch (kind) {
    case "number": return [rest[0], null];
    case "column": return [point[rest[0]], null];
    case "parameter": return [theta[rest[0]], theta.map((_, j) => (j === rest[0] ? 1 : 0))];
    case "equals": return [point[rest[0]] === rest[1] ? 1 : 0, null];
    case "at_least": return [point[rest[0]] >= rest[1] ? 1 : 0, null];
  }
  const parts = rest.map((node) => evaluate(node, theta, point));
  const values = parts.map(([value]) => value);
  switch (kind) {
    case "sum": return combine(values.reduce((a, b) => a + b, 0), parts, values.map(() => 1));
    case "product": {
      const others = values.map((_, i) => values.reduce((a, b, j) => (j === i ? a : a * b), 1));
      return combine(values.reduce((a, b) => a * b, 1), parts, others);
    }
    case "ratio": {
      const [a, b] = values;
      return combine(a / b, parts, [1 / b, -a / (b * b)]);
    }
    case "log": return combine(Math.log(values[0]), parts, [1 / values[0]]);
    case "exp": return combine(Math.exp(values[0]), parts, [Math.exp(values[0])]);
    case "expm1": return combine(Math.expm1(values[0]), parts, [Math.exp(values[0])]);
    case "logsum": {
      const top = Math.max(...values);
      const shares = values.map((x) => Math.exp(x - top));
      const whole = shares.reduce((a, b) => a + b, 0);
      return combine(top + Math.log(whole), parts, shares.map((x) => x / whole));
    }
  }
  throw new Error(`unknown node ${kind}`);
}

function quadratic(x, matrix, y = x) {
  return x.reduce((sum, a, i) => sum + a * matrix[i].reduce((s, m, j) => s + m * y[j], 0), 0);
}

// Quantile of Student's t above one half. With t = sqrt(dof) tan(angle) the distribution function
// is the integral of cos(angle) ** (dof - 1), smooth enough for Gauss-Legendre; it is concave, so
// that Newton's steps from zero rise to the root.
function studentQuantile(probability, dof, [nodes, weights]) {
  let ratio = 1, x = dof / 2;
  for (; x < 60; x += 1) ratio *= x / (x + 0.5);
  const u = 1 / x;  // Gamma(x + 1/2) / Gamma(x) by its asymptotic series
  ratio *= Math.sqrt(x) * (1 + u * (-1 / 8 + u * (1 / 128 + u * (5 / 1024 + u * (-21 / 32768
    + u * (-399 / 262144 + u * (869 / 4194304)))))));
  const density = (angle) => Math.exp((dof - 1) / 2 * Math.log1p(-(Math.sin(angle) ** 2)));
  const goal = (probability - 0.5) * Math.sqrt(Math.PI) / ratio;
  let angle = 0;
  for (let i = 0; i < 60; i += 1) {
    const area = nodes.reduce((s, t, k) => s + weights[k] * density(angle * (1 + t) / 2), 0);
    const step = (goal - area * angle / 2) / density(angle);
    angle += step;
    if (Math.abs(step) < 1e-15 * angle) break;
  }
  return Math.sqrt(dof) * Math.tan(angle);
}

// Mean, variance and degrees of freedom of a new checkpoint's row on the link's scale.
function spread(law, gradient, point) {
  const { residual, terms, covariance, covariance_slopes, scales_covariance } = law.effects;
  const sure = quadratic(gradient, covariance);
  // An offset's fitted levels are in the law; a new one adds its variance, as a new run does.
  const added = terms.map(({ variance, slope, center, column, levels }) =>
    levels.includes(point[column]) ? 0
      : variance * (slope === null ? 1 : (Math.log(point[slope]) - center) ** 2));
  const fresh = added.reduce((a, b) => a + b, residual);
  const slopes = covariance_slopes.map((m) => quadratic(gradient, m));
  [residual, ...added].forEach((x, k) => { slopes[k] += x; });
  const variance = sure + fresh;
  const wobble = quadratic(slopes, scales_covariance);
  const dof = Math.min(Math.max(2 * variance ** 2 / Math.max(wobble, 1e-300), 1), 1e6);
  return { variance, fresh, dof };
}

function quantile(sorted, probability) {
  const at = probability * (sorted.length - 1), low = Math.floor(at);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (at - low) * (sorted[high] - sorted[low]);
}

// Median and central intervals of a new checkpoint, and each factor's share of the prediction.
function predict(law, point) {
  const at = (theta) => law.factors.map(({ tree }) => evaluate(tree, theta, point));
  const parts = at(law.theta);
  const [mean, slope] = combine(parts.reduce((s, [v]) => s + v, 0), parts, parts.map(() => 1));
  const gradient = slope || law.theta.map(() => 0);
  const unlinked = law.link === "log" ? Math.exp : (x) => x;
  const result = { median: unlinked(mean), factors: parts.map(([value]) => value), intervals: {} };
  if (law.interval === null) return result;
  const { variance, fresh, dof } = spread(law, gradient, point);
  const sd = Math.sqrt(Math.max(variance, 0));
  let ends = (level) => {
    const reach = law.interval === "conformal"
      ? (law.reach[level] === null ? Infinity : law.reach[level])
      : studentQuantile(0.5 + level / 200, dof, law.quadrature);
    return [mean - reach * sd, mean + reach * sd];
  };
  if (law.interval === "bootstrap") {
    const scatter = Math.sqrt(fresh);
    const drawn = law.draws.map((theta) => at(theta).reduce((s, [v]) => s + v, 0));
    const noisy = law.noise.map((noise, i) => drawn[i % drawn.length] + noise * scatter);
    const sorted = Float64Array.from(noisy).sort();
    ends = (level) => [quantile(sorted, 0.5 - level / 200), quantile(sorted, 0.5 + level / 200)];
  }
  for (const level of [50, 90]) result.intervals[level] = ends(level).map(unlinked);
  return result;
}
