// Where data comes from: the server, or the data embedded in an exported file.

const box = document.getElementById("baked");
export const baked = box ? JSON.parse(box.textContent) : null;

export async function ask(question, query = {}) {
  if (baked) return find(question, query);
  const answer = await fetch(`api/${question}?${new URLSearchParams(clean(query))}`, { headers: { Accept: "application/json" } });
  const value = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(value.error);
  return value;
}

export function clean(query) {
  return Object.fromEntries(Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== ""));
}

function find(question, query) {
  if (question === "runs") return { folder: "this file", runs: [baked.run] };
  if (question === "run") return baked.run;
  if (question === "conversations") return findRows(query);
  const found = baked[question === "tokens" ? "tokens" : "conversations"][query.id];
  if (!found) throw new Error(`conversation ${query.id} is not in this file`);
  if (question === "tokens") return found;
  const rows = choose(query);
  const place = rows.findIndex((row) => row.id === query.id);
  return { ...found, prompts: baked.prompts, place: place < 0 ? null : place, total: rows.length, previous: rows[place - 1]?.id, next: place < 0 ? null : rows[place + 1]?.id };
}

function findRows(query) {
  const rows = choose(query);
  const offset = Number(query.offset ?? 0);
  return { total: rows.length, reached: rows.length, offset, rows: rows.slice(offset, offset + Number(query.limit ?? 200)), version: 1 };
}

function choose(query) {
  const asked = Object.entries(clean(query)).filter(([key]) => TESTS[key]);
  const rows = baked.rows.filter((row) => asked.every(([key, value]) => TESTS[key](row, value)));
  const order = query.sort ?? "";
  const key = order.replace("-", "");
  if (["reward", "turns", "tokens", "advantage"].includes(key)) rows.sort((a, b) => (a[key] ?? -1) - (b[key] ?? -1));
  return order.startsWith("-") ? rows.reverse() : rows;
}

const TESTS = {
  part: (row, value) => row.part === value,
  step: (row, value) => String(row.step) === value,
  end: (row, value) => row.end === value,
  blame: (row, value) => row.blame === value,
  family: (row, value) => row.family === value,
  level: (row, value) => String(row.level) === value,
  reward: (row, value) => row.outcome === value,
  verdict: (row, value) => row.verdicts.includes(value),
  task: (row, value) => row.task.toLowerCase().includes(value.toLowerCase()),
  lost: (row) => !row.group.some(([, outcome]) => outcome === "won"),
  text: (row, value) => JSON.stringify(baked.conversations[row.id]?.trajectory.turns ?? "").toLowerCase().includes(JSON.stringify(value).slice(1, -1).toLowerCase()),
};
