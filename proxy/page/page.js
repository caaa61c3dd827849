// The live page of weir: it asks the admin port each second and draws what it
// hears. Classes, models, targets and the like come from whoever sends
// requests, so they enter the page as text nodes and never as markup.

// Failures of the page itself are told on it, and found there by its tests.
addEventListener('error', e => broken(e.message || `${e.target?.src ?? e.target?.href ?? 'a file'} did not load`), true);
addEventListener('unhandledrejection', e => broken(String(e.reason?.stack ?? e.reason)));
addEventListener('securitypolicyviolation', e => broken(`forbidden by the policy: ${e.violatedDirective} ${e.blockedURI}`));

function broken(why) {
  document.documentElement.dataset.error = why;
  state.broken = why;
  showTrouble();
}

// ---- What is shown ---------------------------------------------------------

const period = 1000; // ms between two questions
const patience = 4000; // ms until a question counts as unanswered
const historyEvery = 5; // questions; a window is longer than that
const requestsShown = 30;

const causes = {
  healthy: ['Healthy', 'the server keeps up; requests take about as long as without load'],
  queue: ['Queue', 'requests wait, while the server could take more at once'],
  compute: ['Compute', 'the model’s forward pass is the limit; the device is full'],
  transfer: ['Transfer', 'copies between host and device take the time'],
  host: ['Host', 'code on the server’s CPU holds requests up'],
  client: ['Client', 'uploads are slow; the server waits for its clients'],
  mixed: ['Mixed', 'two causes limit the server at once'],
  unknown: ['Unknown', 'the evidence does not carry a verdict yet'],
};

// The parts of a request in the order in which it passes them, with a colour of
// Okabe and Ito's palette and a pattern each. What the network does shares one
// colour and differs by pattern.
const parts = [
  { key: 'queue', name: 'queue', color: '#d55e00', pattern: 'rising', ink: '#0008' },
  { key: 'overhead', name: 'weir itself', color: '#5f6b76', pattern: 'plain', ink: '#0000' },
  { key: 'connect', name: 'connect', color: '#56b4e9', pattern: 'upright', ink: '#0009' },
  { key: 'upload', name: 'upload', color: '#56b4e9', pattern: 'dots', ink: '#0009' },
  { key: 'server_queue', name: 'server queue', color: '#e69f00', pattern: 'falling', ink: '#0008' },
  { key: 'preprocess', name: 'preprocess', color: '#f0e442', pattern: 'level', ink: '#0007' },
  { key: 'transfer', name: 'transfer', color: '#cc79a7', pattern: 'upright', ink: '#0007' },
  { key: 'forward', name: 'forward', color: '#0072b2', pattern: 'plain', ink: '#0000' },
  { key: 'postprocess', name: 'postprocess', color: '#009e73', pattern: 'grid', ink: '#0007' },
  { key: 'stream', name: 'stream', color: '#56b4e9', pattern: 'grid', ink: '#0007' },
  { key: 'unattributed', name: 'unattributed', color: '#a8adb3', pattern: 'sparse', ink: '#000a' },
];
const part = Object.fromEntries(parts.map(p => [p.key, p]));

// The eight parts of a window's latency; from the bottom of the chart up.
const shares = ['queue', 'server_queue', 'upload', 'preprocess', 'transfer', 'forward', 'postprocess', 'unattributed'].map(k => part[k]);

const state = {
  verdict: null, // the last answers
  history: null,
  class: new URLSearchParams(location.search).get('class') ?? '', // shown
  chosen: new URLSearchParams(location.search).has('class'), // by the user
  announced: '',
  asked: 0, // questions since the history was asked for
  paused: false,
  asking: false,
  failures: 0, // in a row
  silent: null, // since when
  why: '', // the last failure
  broken: '', // a fault of the page itself
  timer: 0,
  rows: new Map(), // request's key → row
};

// ---- Small things ----------------------------------------------------------

const $ = id => document.getElementById(id);

/** el makes an element; strings among the children become text. */
function el(tag, properties, ...children) {
  const e = Object.assign(document.createElement(tag), properties);
  e.append(...children);
  return e;
}

/** say writes text only where it differs, so that selections and readers are left alone. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function sayList(list, texts) {
  if (list.children.length === texts.length && texts.every((t, i) => list.children[i].textContent === t)) return;
  list.replaceChildren(...texts.map(t => el('li', { className: 'foreign' }, t)));
}

const space = '\u00a0'; // between number and unit
const told = v => typeof v === 'number' && Number.isFinite(v);

/** ms prints milliseconds with about three digits, in the unit that suits. */
function ms(v) {
  if (!told(v)) return '–';
  if (v < 0) return '−' + ms(-v);
  if (v === 0) return `0${space}ms`;
  if (v < 0.005) return `<0.01${space}ms`;
  if (v < 1) return v.toFixed(2) + space + 'ms';
  if (v < 9.95) return v.toFixed(1) + space + 'ms';
  if (v < 999.5) return v.toFixed(0) + space + 'ms';
  if (v < 9995) return (v / 1000).toFixed(2) + space + 's';
  if (v < 59950) return (v / 1000).toFixed(1) + space + 's';
  return ago(v);
}

/** ago prints a long time in two units at most. */
function ago(v) {
  const s = Math.max(0, Math.round(v / 1000));
  if (s < 60) return `${s}${space}s`;
  if (s < 3600) return `${Math.floor(s / 60)}${space}min ${s % 60}${space}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}${space}h ${Math.floor(s / 60) % 60}${space}min`;
  return `${Math.floor(s / 86400)}${space}d ${Math.floor(s / 3600) % 24}${space}h`;
}

function percent(v) {
  if (!told(v)) return '–';
  if (v > 0 && v < 0.005) return `<1${space}%`;
  return (100 * v).toFixed(0) + space + '%';
}

function rate(v) {
  if (!told(v)) return '–';
  return v.toFixed(v < 10 ? 2 : v < 100 ? 1 : 0) + space + 'requests/s';
}

function bytes(v) {
  if (!told(v)) return '–';
  const unit = ['B', 'kB', 'MB', 'GB', 'TB'];
  let i = 0;
  while (v >= 999.5 && i < unit.length - 1) { v /= 1000; i++; }
  return v.toFixed(i === 0 || v >= 100 ? 0 : 1) + space + unit[i];
}

const count = v => told(v) ? v.toLocaleString('en') : '–';
const plural = (n, one, many = one + 's') => `${count(n)} ${n === 1 ? one : many}`;
const clockOf = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const shortClockOf = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit' });
const dayOf = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short' });

/** when prints an instant of today as its time, another with its day. */
function when(date) {
  const today = date.toDateString() === new Date().toDateString();
  return (today ? '' : dayOf.format(date) + ', ') + clockOf.format(date);
}

/** instant reads a time of the server; Go's zero time is none. */
function instant(text) {
  const t = Date.parse(text);
  return Number.isNaN(t) || t < 0 ? null : new Date(t);
}

// ---- Patterns --------------------------------------------------------------

const strokes = {
  plain: '',
  rising: 'M-2 2 2-2M0 8 8 0M6 10 10 6',
  falling: 'M6-2 10 2M0 0 8 8M-2 6 2 10',
  level: 'M0 2h8M0 6h8',
  upright: 'M2 0v8M6 0v8',
  grid: 'M0 4h8M4 0v8',
  dots: 'M1 2h2M5 6h2',
  sparse: 'M3 4h1.5',
};

/** tile draws a part's pattern once, for the charts and for the bars alike. */
function tile(p) {
  if (p.tile) return p.tile;
  const scale = Math.max(1, Math.round(devicePixelRatio));
  const c = el('canvas', { width: 8 * scale, height: 8 * scale });
  const g = c.getContext('2d');
  g.scale(scale, scale);
  g.fillStyle = p.color;
  g.fillRect(0, 0, 8, 8);
  g.strokeStyle = p.ink;
  g.lineWidth = p.pattern === 'dots' || p.pattern === 'sparse' ? 1.8 : 1.2;
  g.stroke(new Path2D(strokes[p.pattern]));
  return p.tile = c;
}

/** paint gives an element a part's colour and pattern. */
function paint(element, p) {
  p.image ??= `url(${tile(p).toDataURL()})`;
  element.style.background = `${p.color} ${p.image} 0 0 / 8px 8px`;
  return element;
}

function key(kind, p) {
  if (kind === 'part') return paint(el('span', { className: 'swatch' }), p);
  const e = el('span', { className: kind });
  if (p) e.style.borderColor = p;
  return e;
}

/** legend fills a list with keys and returns a function that sets their values. */
function legend(list, entries) {
  const values = entries.map(([kind, look, name]) => {
    const value = el('b', {});
    list.append(el('li', {}, key(kind, look), name + ' ', value));
    return value;
  });
  return texts => texts.forEach((t, i) => say(values[i], t));
}

// ---- Charts ----------------------------------------------------------------

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const axisFont = '12px system-ui, sans-serif';

function axis(values, more) {
  return {
    font: axisFont, values,
    stroke: () => style('--quiet'),
    grid: { stroke: () => style('--grid'), width: 1 },
    ticks: { stroke: () => style('--rule'), width: 1, size: 5 },
    ...more,
  };
}

const timeAxis = () => axis((u, at, i, gap, step) => at.map(t => (step < 60 ? clockOf : shortClockOf).format(t * 1000)), { space: 76, size: 28 });
const valueAxis = print => axis((u, at) => at.map(print), { size: 64, space: 32 });

/** chart makes a plot that fills its place and follows its width; null without uPlot. */
function chart(host, options) {
  if (!globalThis.uPlot) return null;
  const size = () => ({ width: Math.max(120, host.clientWidth), height: Math.max(80, host.clientHeight) });
  const plot = new uPlot({
    ...size(), padding: [10, 12, 0, 0],
    legend: { show: false },
    ...options,
    cursor: { drag: { x: false, y: false }, points: { show: false }, y: false, ...options.cursor },
  }, options.series.map(() => []), host);
  new ResizeObserver(() => {
    const s = size();
    if (s.width !== plot.width || s.height !== plot.height) plot.setSize(s);
  }).observe(host);
  return plot;
}

/** area is a series filled down to the axis with a part's pattern. Those drawn later cover it. */
function area(p) {
  return {
    points: { show: false }, width: 1,
    stroke: () => style('--card'),
    fill: u => u.ctx.createPattern(tile(p), 'repeat'),
  };
}

const curve = (color, more) => ({ points: { show: false }, width: 2, stroke: () => style(color), ...more });

/**
 * timeline gives an x to each window's end and the index of the window there.
 * Where no requests came there is a gap (index -1), and the first window after
 * it starts flat, so that a single window can be seen.
 */
function timeline(points) {
  const ends = points.map(p => Date.parse(p.end) / 1000);
  const length = median(ends.slice(1).map((e, i) => e - ends[i])) || 10;
  const x = [], window = [];
  const put = (at, i) => { x.push(at); window.push(i); };
  ends.forEach((end, i) => {
    const start = i > 0 ? ends[i - 1] : -Infinity;
    if (end - start > 1.5 * length) {
      if (i > 0) put((start + end - length) / 2, -1);
      put(end - length, i);
    }
    put(end, i);
  });
  return { x, window, of: f => window.map(i => i < 0 ? null : f(points[i])) };
}

const median = values => values.sort((a, b) => a - b)[values.length >> 1];

const share = (p, k) => Math.max(0, p.shares?.[k] ?? 0);
const waitingShare = p => share(p, 'queue') + share(p, 'server_queue');

const charts = {};

/** follow shows the values under the pointer in the keys, and the newest otherwise. */
function follow(u) {
  const { line, points } = charts;
  if (!points?.length) return;
  const i = u?.cursor.idx == null ? -1 : line.window[u.cursor.idx] ?? -1;
  keys(points[i < 0 ? points.length - 1 : i]);
}

function keys(p) {
  charts.partKeys(shares.map(s => percent(share(p, s.key))));
  const alert = state.history?.alert;
  charts.queueKeys([percent(share(p, 'queue')), percent(share(p, 'server_queue')), alert > 0 ? percent(alert) : 'none']);
  charts.latencyKeys([ms(p.mean_ms), ms(p.p95_ms)]);
}

const timeCursor = { sync: { key: 'time' } };

function makeCharts() {
  charts.partKeys = legend($('parts-legend'), shares.map(p => ['part', p, p.name]));
  charts.queueKeys = legend($('queue-legend'), [
    ['part', part.queue, 'queue in weir'], ['part', part.server_queue, 'queue in the server'], ['stroke dashed', 'currentColor', 'alert line']]);
  charts.latencyKeys = legend($('latency-legend'), [['stroke', 'var(--mean)', 'mean latency'], ['stroke dashed', 'var(--slow)', 'p95, all but the slowest 5 %']]);
  charts.forwardKeys = legend($('forward-legend'), [['dot', '', 'one request'], ['stroke', 'var(--slow)', 'fitted line']]);
  const whole = { y: { range: [0, 1] } };
  charts.parts = chart($('parts-chart'), {
    series: [{}, ...[...shares].reverse().map(area)], scales: whole,
    axes: [timeAxis(), valueAxis(percent)], cursor: timeCursor, hooks: { setCursor: [follow] },
  });
  charts.queue = chart($('queue-chart'), {
    series: [{}, area(part.server_queue), area(part.queue)], scales: whole,
    axes: [timeAxis(), valueAxis(percent)], cursor: timeCursor, hooks: { setCursor: [follow], draw: [drawAlert] },
  });
  charts.latency = chart($('latency-chart'), {
    series: [{}, curve('--mean'), curve('--slow', { dash: [6, 4] })], scales: { y: { range: fromZero } },
    axes: [timeAxis(), valueAxis(ms)], cursor: timeCursor, hooks: { setCursor: [follow] },
  });
  makeForward();
}

const fromZero = (u, low, high) => [0, high > 0 ? high * 1.08 : 1];

function makeForward() {
  charts.forward = chart($('forward-chart'), {
    series: [{},
      { paths: () => null, points: { show: true, size: 7, width: 1, stroke: () => style('--dot'), fill: () => style('--dot') + '66' } },
      { points: { show: false }, width: 2.5, stroke: () => style('--slow') }],
    scales: { x: { time: false, range: fromZero }, y: { range: fromZero } },
    axes: [axis((u, at) => at.map(String), { size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }), valueAxis(ms)],
  });
}

/** drawAlert draws the line from which the queue's share is alarming. */
function drawAlert(u) {
  const at = state.history?.alert;
  if (!(at > 0)) return;
  const { ctx, bbox } = u;
  const y = Math.round(u.valToPos(at, 'y', true)) + 0.5;
  ctx.save();
  ctx.lineWidth = 2 * uPlot.pxRatio;
  for (const [color, dash] of [[style('--card'), []], [style('--text'), [6, 4]]]) {
    ctx.strokeStyle = color;
    ctx.setLineDash(dash.map(d => d * uPlot.pxRatio));
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
  }
  ctx.restore();
}

/** fill draws a chart, or says that there is nothing to draw. */
function fill(plot, host, data, description) {
  const some = data[0].length > 0;
  const section = host.closest('section');
  for (const e of section.querySelectorAll('.chart, .legend, .numbers')) e.hidden = !some;
  section.querySelector('.empty').hidden = some;
  if (!some) return;
  host.setAttribute('aria-label', description);
  plot?.setData(data);
}

function showHistory() {
  document.body.classList.toggle('loading', !state.history);
  if (!state.history) return;
  const points = (state.history.points ?? []).filter(p => instant(p.end));
  const line = timeline(points);
  Object.assign(charts, { points, line });
  const last = points.at(-1) ?? {};
  const sums = shares.map((_, n) => line.of(p => shares.slice(0, n + 1).reduce((sum, s) => sum + share(p, s.key), 0)));
  fill(charts.parts, $('parts-chart'), [line.x, ...sums.reverse()], 'Share of each part over time. Newest: '
    + shares.filter(s => share(last, s.key) >= 0.005).map(s => `${s.name} ${percent(share(last, s.key))}`).join(', '));
  fill(charts.queue, $('queue-chart'), [line.x, line.of(waitingShare), line.of(p => share(p, 'queue'))],
    `Share of both queues over time. Newest: ${percent(waitingShare(last))}; alert line at ${percent(state.history.alert)}`);
  fill(charts.latency, $('latency-chart'), [line.x, line.of(p => p.mean_ms), line.of(p => p.p95_ms)],
    `Latency over time. Newest: mean ${ms(last.mean_ms)}, p95 ${ms(last.p95_ms)}`);
  follow(charts.parts);
  showForward();
  for (const refresh of Object.values(numbers)) refresh();
}

/** cloud picks the measured points: against the batch where one is told, else against the requests in flight. */
function cloud() {
  const all = (state.history?.forward ?? []).filter(p => told(p.forward_ms));
  const against = current()?.forward?.against || (all.length && !all.some(p => p.batch > 0) ? 'inflight' : 'batch');
  const points = all.map(p => [p[against], p.forward_ms]).filter(p => p[0] > 0).sort((a, b) => a[0] - b[0]);
  return { points, against: against === 'batch' ? 'batch' : 'requests in flight' };
}

function showForward() {
  const { points, against } = cloud();
  const line = current()?.forward;
  say($('against'), against);
  const fit = x => line ? Math.max(0, line.intercept_ms + line.slope_ms * x) : null;
  const x = points.map(p => p[0]), y = points.map(p => p[1]);
  if (x.length) { x.unshift(0); y.unshift(null); } // so that the line reaches the axis
  fill(charts.forward, $('forward-chart'), [x, y, x.map(fit)], `Forward against ${against}, ${plural(points.length, 'request')}. ${lineInWords(line)}`);
  charts.forwardKeys([`(the last ${points.length})`, line ? '' : '(none)']);
  say($('line'), points.length ? lineInWords(line) : '');
}

function lineInWords(line) {
  if (!line) return 'No line can be fitted yet: it takes some twenty executions, and batches that differ.';
  const flight = line.against === 'inflight';
  const e = v => v.toFixed(2).replace('-', '−');
  return `Forward = ${ms(line.intercept_ms)} + ${ms(line.slope_ms)} for each request ${flight ? 'in flight' : 'in the batch'}. `
    + `Elasticity ${e(line.elasticity)} (95 % confidence interval ${e(line.ci95[0])} to ${e(line.ci95[1])}, from ${plural(line.n, flight ? 'request' : 'execution')}): `
    + `twice ${flight ? 'as many in flight' : 'the batch'} makes the forward pass ${(2 ** line.elasticity).toFixed(2)} times as long. `
    + 'At 0 a larger batch costs nothing; at 1 it costs as much as it brings.';
}

// ---- Tables behind the charts ----------------------------------------------

const numbers = {};

/** table puts a table into a details element, and fills it only while it is open. */
function table(id, caption, head, rows) {
  const details = $(id);
  const body = el('tbody', {});
  details.append(el('div', { className: 'scroll', tabIndex: 0, role: 'region', ariaLabel: caption },
    el('table', {}, el('caption', { className: 'hear' }, caption),
      el('thead', {}, el('tr', {}, ...head.map(h => el('th', { scope: 'col' }, h)))), body)));
  const refresh = () => {
    if (details.open) body.replaceChildren(...rows().map(r => el('tr', {}, ...r.map(c => el('td', {}, c)))));
  };
  details.addEventListener('toggle', refresh);
  numbers[id] = refresh;
}

const newestFirst = () => [...charts.points ?? []].reverse();
const endOf = p => when(new Date(p.end));

function makeTables() {
  table('parts-numbers', 'Share of each part in each window, newest first', ['Window’s end', 'Requests', ...shares.map(s => s.name), 'Verdict'],
    () => newestFirst().map(p => [endOf(p), count(p.requests), ...shares.map(s => percent(share(p, s.key))), p.cause ?? '']));
  table('queue-numbers', 'Queue share and latency of each window, newest first', ['Window’s end', 'Both queues', 'Queue in weir', 'Mean', 'p95', 'Throughput'],
    () => newestFirst().map(p => [endOf(p), percent(waitingShare(p)), percent(share(p, 'queue')), ms(p.mean_ms), ms(p.p95_ms), rate(p.throughput)]));
  table('forward-numbers', 'Forward time by batch or by requests in flight', ['Batch, or in flight', 'Requests', 'Shortest', 'Mean', 'Longest'], forwardRows);
}

/** forwardRows sums the cloud up, a row for each x. */
function forwardRows() {
  const groups = new Map();
  for (const [x, y] of cloud().points) groups.set(x, [...groups.get(x) ?? [], y]);
  return [...groups].map(([x, y]) => {
    return [count(x), count(y.length), ms(Math.min(...y)), ms(y.reduce((a, b) => a + b) / y.length), ms(Math.max(...y))];
  });
}

// ---- Verdict ---------------------------------------------------------------

/** current is the verdict of the class that is shown. */
function current() {
  return state.verdict?.classes?.find(c => c.class === state.class);
}

/** pickClass keeps the class that is shown; the busiest is the first choice, and the user's the last word. */
function pickClass() {
  const classes = state.verdict.classes ?? [];
  if (state.chosen || classes.some(c => c.class === state.class) || !classes.length) return;
  state.class = classes[0].class;
  state.asked = 0;
}

const short = text => text.length > 80 ? text.slice(0, 79) + '…' : text;

function showChooser() {
  const classes = (state.verdict.classes ?? []).map(c => [c.class, `${short(c.class)} (${c.cause})`]);
  if (state.chosen && !classes.some(c => c[0] === state.class)) classes.push([state.class, `${short(state.class)} (no requests)`]);
  $('chooser').hidden = classes.length < 2;
  const select = $('class');
  const same = select.options.length === classes.length && classes.every((c, i) => select.options[i].text === c[1] && select.options[i].value === c[0]);
  if (!same) select.replaceChildren(...classes.map(([value, text]) => el('option', { value, textContent: text })));
  select.value = state.class;
}

function choose(name) {
  state.class = name;
  state.chosen = true;
  state.asked = 0;
  history.replaceState(null, '', '?' + new URLSearchParams({ class: name }));
  state.history = null; // it is another class's
  show();
  ask(true);
}

function showVerdict() {
  const v = current();
  const [name, meaning] = v ? causes[v.cause] ?? [v.cause, ''] : nothingWords();
  const known = v && v.cause in causes ? v.cause : 'unknown';
  $('verdict').dataset.cause = known;
  $('icon').setAttribute('href', `#icon-${known}`);
  if ($('words').textContent !== `${name}: ${meaning}`) $('words').replaceChildren(el('b', {}, name), `: ${meaning}`);
  say($('meta'), v ? meta(v) : '');
  $('why').hidden = !v;
  showList('evidence', v?.evidence);
  showList('warnings', v?.warnings);
  say($('advice'), v?.advice ?? '');
  $('advice-box').hidden = !v?.advice;
  showNothing(!v);
  announce(v, name, meaning);
}

function showList(id, texts) {
  sayList($(id), texts ?? []);
  $(`${id}-box`).hidden = !texts?.length;
}

function meta(v) {
  const since = instant(v.since);
  return [
    v.confidence > 0 ? `confidence ${v.confidence.toFixed(2)} of 1` : '',
    since ? `since ${when(since)} (${ago(Date.now() - since)})` : '',
    `${plural(v.requests, 'request')}, mean ${ms(v.mean_ms)}, p95 ${ms(v.p95_ms)}, ${rate(v.throughput)}`,
  ].filter(Boolean).join(' · ');
}

/** nothingWords is said where there is no verdict. */
function nothingWords() {
  if (state.verdict.admitted > 0 || state.rows.size > 0) return ['No verdict now', 'no request has ended lately'];
  return ['No request yet', 'there is nothing to judge'];
}

function showNothing(nothing) {
  $('nothing').hidden = !nothing;
  const fresh = !(state.verdict.admitted > 0 || state.rows.size > 0);
  const listen = state.verdict.listen ?? '';
  say($('nothing-words'), !fresh ? 'A verdict is made at the end of each window (10 s unless set otherwise) in which requests ended.'
    : `Send one to ${listen || 'weir’s own address (listen)'} instead of the server; the verdict follows at the end of the window. With your server’s own path in place of /asr:`);
  $('nothing-try').hidden = !fresh;
  say($('nothing-try'), `curl --data-binary @audio.wav ${listen || 'LISTEN'}/asr`);
}

/** announce tells screen readers of a new cause, and of nothing else. */
function announce(v, name, meaning) {
  const news = `${v?.class ?? ''} ${name}`;
  if (news === state.announced) return;
  state.announced = news;
  say($('announce'), `${v ? `Verdict for ${v.class}: ` : ''}${name}: ${meaning}`);
  document.title = `${name} – weir`;
}

// ---- Queue, limits, trust --------------------------------------------------

/** tiles keeps a list of named values, each with its meaning, up to date. */
function tiles(list, entries) {
  entries.forEach((entry, i) => updateTile(list.children[i] ?? list.appendChild(newTile()), entry));
  while (list.children.length > entries.length) list.lastChild.remove();
}

function newTile() {
  return el('div', {}, el('dt', {}), el('dd', { className: 'value' }, el('span', {}), ' ', el('small', {})),
    el('dd', { className: 'gauge', ariaHidden: 'true' }, el('div', {})), el('dd', { className: 'about' }));
}

function updateTile(tile, { name, value, unit = '', about, full, attention = false }) {
  const [title, number, gauge, words] = tile.children;
  say(title, name);
  say(number.firstChild, value);
  say(number.lastChild, unit);
  say(words, about);
  gauge.hidden = full === undefined;
  gauge.classList.toggle('full', full >= 1);
  gauge.firstChild.style.width = `${100 * Math.min(1, full ?? 0)}%`;
  tile.classList.toggle('attention', attention);
}

function showLimits() {
  const v = state.verdict, c = current();
  const limit = v.max_concurrency, places = v.max_queue_size;
  $('draining').hidden = !v.draining;
  tiles($('limits'), [
    { name: 'Waiting', value: count(v.waiting), unit: limit > 0 ? `of ${count(places)}` : '', full: limit > 0 ? v.waiting / Math.max(1, places) : undefined,
      about: limit > 0 ? 'in weir’s queue, of max_queue_size' : 'no max_concurrency is set, so none waits in weir' },
    { name: 'In flight', value: count(v.inflight), unit: limit > 0 ? `of ${count(limit)}` : '', full: limit > 0 ? v.inflight / limit : undefined,
      about: limit > 0 ? 'in the server, of max_concurrency' : 'in the server; no limit is set' },
    { name: 'Oldest waiting', value: v.waiting > 0 ? ms(v.oldest_waiting_ms) : 'none', about: 'how long the first in line has waited' },
    { name: 'Oldest in flight', value: v.inflight > 0 ? ms(v.oldest_inflight_ms) : 'none', about: 'the request that is longest in the server' },
    { name: 'Rejected', value: count(c?.rejected ?? 0), attention: c?.rejected > 0, about: 'in the window: the queue was full' },
    { name: 'Expired', value: count(c?.expired ?? 0), attention: c?.expired > 0, about: 'in the window: waited longer than queue_timeout' },
    { name: 'Canceled', value: count(c?.canceled ?? 0), about: 'in the window: the client left first' },
    { name: 'Failed', value: count(c?.failed ?? 0), attention: c?.failed > 0, about: 'in the window: the exchange broke' },
    { name: 'Abandoned', value: count(v.abandoned), about: 'since the start: clients that left while the server worked for them' },
    { name: 'Telemetry dropped', value: count(v.dropped), attention: v.dropped > 0, about: 'records lost before they were counted or exported; no request is touched' },
  ]);
}

function showTrust() {
  const v = state.verdict, c = current();
  const coverage = c?.ok > c?.refused ? c.timed / (c.ok - c.refused) : undefined;
  const inSystem = (v.classes ?? []).reduce((sum, k) => sum + k.throughput * k.mean_ms / 1000, 0);
  tiles($('trust'), [
    { name: 'Requests seen', value: count(c?.requests ?? 0), unit: 'in the window', attention: !!c && c.requests < state.verdict.thresholds.min_requests, about: `${count(v.admitted)} admitted since the start, all classes` },
    { name: 'Answered', value: count(c?.ok ?? 0), about: 'by the server, whatever the status' },
    { name: 'With stage timings', value: count(c?.timed ?? 0), unit: coverage === undefined ? '' : `(${percent(coverage)})`, attention: coverage < state.verdict.thresholds.coverage,
      full: coverage === undefined || coverage >= 1 ? undefined : coverage, about: 'of the answered: the server told where its time went' },
    { name: 'Behind the line', value: count(c?.forward?.n ?? 0), about: 'executions of the model from which forward’s line is fitted' },
    { name: 'In the system', value: inSystem > 0 ? inSystem.toFixed(1) : '0', about: `throughput × latency, all classes (Little’s law); now waiting and in flight: ${count(v.waiting + v.inflight)}` },
  ]);
  sayList($('doubts'), doubts(c, coverage));
}

function doubts(c, coverage) {
  if (!c) return [];
  const list = [];
  if (c.requests < state.verdict.thresholds.min_requests) list.push(`n is too small: ${plural(c.requests, 'request')} in the window; a verdict takes ${state.verdict.thresholds.min_requests}.`);
  if (c.ok > 0 && c.timed === 0) list.push('The server tells no stage timings (Server-Timing or the like), so only queue, upload and total can be told apart.');
  else if (coverage < state.verdict.thresholds.coverage) list.push(`Only ${percent(coverage)} of the answered requests carry timings; those without may differ from them.`);
  if (!c.forward) list.push('No line is fitted to forward: the window holds too few executions, or batches that hardly differ.');
  return list;
}

// ---- Requests --------------------------------------------------------------

/** showRequests adds rows for new records on top, and drops old ones that nobody looks at. */
function showRequests(records) {
  const list = $('requests');
  const seen = new Set();
  for (const r of records) { // oldest first
    const id = `${r.start} ${r.span_id ?? ''} ${r.total_ms ?? ''}`;
    seen.add(id);
    if (state.rows.has(id)) continue;
    const row = requestRow(r);
    state.rows.set(id, row);
    list.prepend(row.item);
  }
  for (const [id, row] of state.rows) {
    if (seen.has(id) || row.details.open || row.item.contains(document.activeElement)) continue;
    row.item.remove();
    state.rows.delete(id);
  }
}

/** arrangeRequests hides what is not asked for and gives all bars one scale, that of the slowest; tunnels and endless streams are not to set it. */
function arrangeRequests() {
  const only = !$('chooser').hidden && $('only').checked;
  $('only-box').hidden = $('chooser').hidden;
  for (const r of state.rows.values()) r.item.hidden = only && r.record.class !== state.class;
  const rows = [...state.rows.values()].filter(r => !r.item.hidden);
  const stretch = $('stretch').checked;
  const longest = Math.max(0, ...rows.filter(r => !r.record.upgraded).map(r => r.total));
  for (const r of rows) r.bar.style.width = `${stretch || !longest ? 100 : Math.min(100, 100 * r.total / longest)}%`;
  say($('bar-scale'), longest && !stretch ? `parts; full width is ${ms(longest)}` : 'parts');
  const used = new Set(rows.flatMap(r => r.used));
  for (const [p, item] of requestKeys) item.hidden = !used.has(p);
  $('requests-empty').hidden = rows.length > 0;
}

const requestKeys = new Map();

function makeRequestKeys() {
  for (const p of parts) {
    const item = el('li', {}, key('part', p), p.name);
    requestKeys.set(p, item);
    $('requests-legend').append(item);
  }
}

function requestRow(r) {
  const total = told(r.total_ms) ? r.total_ms : 0;
  const split = parts.map(p => [p, r.ledger?.[p.key] ?? 0]).filter(([, v]) => v > 0);
  const bar = el('span', { className: 'bar', role: 'img', ariaLabel: largest(split) }, ...split.map(segment));
  const details = el('details', {}, el('summary', {},
    el('span', { className: 'ended' }, endedAt(r, total)), ' ', statusOf(r), ' ',
    el('span', { className: 'total' }, ms(r.total_ms)), ' ',
    el('span', { className: 'track' }, bar), ' ',
    cell('batch', 'batch ', r.batch ? count(r.batch) : '–'), ' ',
    cell('audio', 'audio ', r.audio_seconds ? `${r.audio_seconds.toFixed(1)}${space}s` : '–'), ' ',
    el('span', { className: 'trace mono' }, r.trace_id ?? '')));
  details.addEventListener('toggle', () => details.open && details.children.length === 1 && details.append(inside(r, total)));
  return { record: r, total, bar, details, used: split.filter(s => s[1] > total / 200).map(s => s[0]), item: el('li', {}, details) };
}

/** cell holds a value whose unit or name stands in the column's head, where there is one. */
const cell = (name, unit, value) => el('span', { className: name }, el('span', { className: 'unit' }, unit), value);

function segment([p, v]) {
  const e = paint(el('span', { className: 'part', title: `${p.name} ${ms(v)}` }, el('span', {}, `${p.name} ${ms(v)}`)), p);
  e.style.flex = `${v} 1 0`;
  return e;
}

const largest = split => [...split].sort((a, b) => b[1] - a[1]).slice(0, 3).map(([p, v]) => `${p.name} ${ms(v)}`).join(', ');

function endedAt(r, total) {
  const start = instant(r.start);
  return start ? clockOf.format(new Date(+start + total)) : '–';
}

/** statusOf says how a request ended: the status, and in words where it did not go well. */
function statusOf(r) {
  const good = r.outcome === 'ok' && r.status < 400;
  const words = [r.status || '', r.outcome === 'ok' ? (good ? 'ok' : 'error') : r.outcome, r.upgraded ? 'tunnel' : ''];
  return el('span', { className: good ? 'status' : 'status bad' }, words.filter(Boolean).join(' '));
}

/** inside holds all numbers of one request. It is made when its row is first opened. */
function inside(r, total) {
  const box = el('div', { className: 'inside' });
  const ledger = [...parts.map(p => [p.name, r.ledger?.[p.key]]), ['overlap (in parallel)', r.ledger?.overlap]].filter(l => l[1] > 0);
  box.append(
    facts('Where its time went', [...(r.before_ms > 0 ? [['before weir', ms(r.before_ms)]] : []),
      ...ledger.map(([name, v]) => [name, total > 0 ? `${ms(v)} (${percent(v / total)})` : ms(v)]), ['total', ms(r.total_ms)]]),
    facts('What the server told', [...(r.timings ?? []).map(timing), ['server’s total', r.server_total_ms ? ms(r.server_total_ms) : ''],
      ['told by', r.source], ['batch', r.batch], ['sequence length', r.seq], ['tokens', r.tokens],
      ['audio', r.audio_seconds ? `${r.audio_seconds}${space}s` : ''], ['model', r.model]]),
    facts('What it was', [['trace', r.trace_id && copyable(r.trace_id)], ['span', r.span_id], ['parent span', r.parent_id],
      ['class', r.class], ['request', [r.method, r.target].filter(Boolean).join(' ')], ['protocol', r.protocol], ['host', r.host],
      ['client', r.client], ['user agent', r.user_agent], ['outcome', [r.outcome, r.error].filter(Boolean).join(', ')],
      ['waiting when it came', count(r.waiting)], ['in flight with it', count(r.inflight) + (r.max_concurrency ? ` of ${count(r.max_concurrency)}` : '')],
      ['received', bytes(r.bytes_in)], ['sent back', bytes(r.bytes_out)]]));
  return box;
}

function timing(t) {
  const more = [t.stage !== t.name ? `as ${t.stage}` : '', t.bytes ? bytes(t.bytes) : '', t.n ? `n=${count(t.n)}` : '',
    t.sync ? 'synchronised' : '', t.untrusted ? 'cannot be true, not used' : ''];
  return [t.name, [ms(t.dur_ms), ...more.filter(Boolean)].join(', ')];
}

/** facts is a list of those facts that are told. */
function facts(title, pairs) {
  const list = el('dl', {});
  for (const [name, value] of pairs) {
    if (value) list.append(el('dt', {}, name), el('dd', {}, value instanceof Node ? value : String(value)));
  }
  if (!list.children.length) list.append(el('dt', {}, 'nothing'));
  return el('div', {}, el('h3', {}, title), list);
}

/** copyable is text with a button. Without a secure context there is no clipboard, so the text is selected instead. */
function copyable(text) {
  const code = el('code', {}, text);
  const button = el('button', { type: 'button', onclick: copy, ariaLabel: 'Copy the trace id' }, 'Copy');
  async function copy() {
    getSelection().selectAllChildren(code);
    const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
    button.textContent = done ? 'Copied' : 'Selected';
  }
  return el('span', {}, code, ' ', button);
}

// ---- Asking ----------------------------------------------------------------

async function get(path) {
  const r = await fetch(path, { cache: 'no-store', signal: AbortSignal.timeout(patience) });
  if (!r.ok) throw new Error(`${path.split('?')[0]} answered ${r.status}`);
  return r.text();
}

/** ask puts one round of questions and shows the answers. One round runs at a time; none while the page is hidden, or paused unless wanted. */
async function ask(wanted = false) {
  clearTimeout(state.timer);
  if (state.asking || document.hidden || (state.paused && !wanted)) return;
  state.asking = true;
  try {
    const answers = await round();
    if (answers) answered(answers);
  } finally {
    state.asking = false;
    state.timer = setTimeout(ask, Math.min(5, 1 + state.failures / 5) * period); // a dead weir is asked less and less often
  }
}

/** round returns the answers, or null where weir did not give them. */
async function round() {
  try {
    const [verdict, requests] = await Promise.all([get('api/verdict'), get(`api/requests?n=${requestsShown}`)]);
    const answers = { verdict: JSON.parse(verdict), requests: requests.split('\n').filter(Boolean).map(line => JSON.parse(line)) };
    state.verdict = answers.verdict;
    pickClass();
    if (state.asked++ % historyEvery === 0) answers.history = JSON.parse(await get(`api/history?class=${encodeURIComponent(state.class)}`));
    return answers;
  } catch (e) {
    state.failures++;
    state.asked = 0;
    state.silent ??= new Date();
    state.why = reason(e);
    showTrouble();
    return null;
  }
}

function reason(e) {
  if (e.name === 'TimeoutError') return `nothing came within ${patience / 1000} s`;
  return e instanceof TypeError ? 'no connection' : e.message; // fetch throws a TypeError
}

function answered({ requests, history }) {
  state.failures = 0;
  state.silent = null;
  if (history && (history.class ?? state.class) === state.class) state.history = history;
  showTrouble();
  showRequests(requests);
  show(history !== undefined);
}

/** show draws everything but the requests from what is known. */
function show(all = true) {
  if (!state.verdict) return;
  showChooser();
  showVerdict();
  showLimits();
  showTrust();
  arrangeRequests();
  if (all) showHistory();
  say($('server'), state.verdict.server ?? '');
  say($('version'), state.verdict.version ?? '');
  if (!state.silent) say($('updated'), `updated ${clockOf.format(new Date())}`);
}

function showTrouble() {
  const text = state.silent ? `weir does not answer (since ${clockOf.format(state.silent)}: ${state.why}). What is shown here is older; the page keeps asking.`
    : state.broken ? `The page itself has failed: ${state.broken}` : '';
  document.body.classList.toggle('stale', !!state.silent);
  $('trouble').hidden = !text;
  say($('trouble'), text);
}

function pause() {
  state.paused = !state.paused;
  say($('pause'), state.paused ? 'Resume' : 'Pause');
  if (state.paused) say($('updated'), `paused at ${clockOf.format(new Date())}`);
  else ask();
}

makeCharts();
makeTables();
makeRequestKeys();
$('pause').addEventListener('click', pause);
$('class').addEventListener('change', e => choose(e.target.value));
for (const id of ['stretch', 'only']) $(id).addEventListener('change', arrangeRequests);
document.addEventListener('visibilitychange', () => ask());
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  for (const c of ['parts', 'queue', 'latency', 'forward']) charts[c]?.redraw();
});
ask();
