"use strict";

const element = (id) => document.getElementById(id);
const messages = [];
let controller = null;

// Asks for the key once where the server wants one.
function headers() {
  const key = sessionStorage.getItem("key");
  const common = { "Content-Type": "application/json" };
  return key ? { ...common, Authorization: "Bearer " + key } : common;
}

async function ask(path, options = {}) {
  let answer = await fetch(path, { ...options, headers: headers() });
  if (answer.status === 401) {
    const key = prompt("This server asks for an API key");
    if (key) {
      sessionStorage.setItem("key", key);
      answer = await fetch(path, { ...options, headers: headers() });
    }
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new Error(body.error ? body.error.message : "status " + answer.status);
}

function show(role, text) {
  const box = document.createElement("div");
  box.className = "message " + role;
  box.textContent = text;
  element("messages").append(box);
  box.scrollIntoView({ block: "end" });
  return box;
}

// The events of a stream, as they come.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function requestBody(text) {
  const common = {
    temperature: Number(element("temperature").value),
    max_tokens: Number(element("tokens").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (element("plain").checked) return ["/v1/completions", { ...common, prompt: text }];
  messages.push({ role: "user", content: text });
  return ["/v1/chat/completions", { ...common, messages }];
}

async function send(text) {
  show("user", text);
  const [path, body] = requestBody(text);
  const box = show("assistant", "");
  controller = new AbortController();
  element("send").disabled = true;
  element("stop").disabled = false;
  const began = performance.now();
  let first = 0, count = 0;
  try {
    const answer = await ask(path, {
      method: "POST", body: JSON.stringify(body), signal: controller.signal,
    });
    for await (const event of events(answer)) {
      if (event.usage) {
        const { prompt_tokens: read, completion_tokens: made } = event.usage;
        element("counts").textContent =
          `${made} tokens, ${read} read, first after ${(first - began).toFixed(0)} ms`;
      }
      if (!event.choices.length) continue;
      const choice = event.choices[0];
      const piece = choice.delta ? choice.delta.content : choice.text;
      if (!piece) continue;
      const now = performance.now();
      if (!first) first = now;
      count += 1;
      if (now > first) element("speed").value = ((count - 1) / ((now - first) / 1000)).toFixed(1);
      box.textContent += piece;
      box.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (!box.textContent) box.remove();
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    if (path.endsWith("chat/completions")) {
      messages.push({ role: "assistant", content: box.textContent });
    }
    element("send").disabled = false;
    element("stop").disabled = true;
    controller = null;
  }
}

const svgName = "http://www.w3.org/2000/svg";

function draw(name, attributes, text) {
  const shape = document.createElementNS(svgName, name);
  for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
  if (text !== undefined) shape.textContent = text;
  element("picture").append(shape);
}

// The checkpoint, the physical rows of the ring with those that hold tokens, and the cursor.
function picture(status, request) {
  element("picture").replaceChildren();
  const replay = status.route !== "conventional";
  draw("rect", { class: "checkpoint", x: 10, y: 22, width: 96, height: 66, rx: 4 });
  draw("text", { x: 10, y: 14 }, "checkpoint");
  draw("text", { x: 18, y: 50 }, "tokens up to");
  draw("text", { x: 18, y: 66 }, String(request.checkpoint_tokens));
  if (!replay) {
    draw("text", { class: "soft", x: 122, y: 58 }, "rewritten at every token");
    return;
  }
  const rows = status.ring_rows, width = 232 / rows;
  draw("text", { x: 118, y: 14 }, `ring of ${rows} rows`);
  const used = new Set();
  for (let i = 0; i < request.ring_count; i += 1) used.add((request.ring_start + i) % rows);
  for (let row = 0; row < rows; row += 1) {
    draw("rect", {
      class: used.has(row) ? "filled" : "box", "data-row": row,
      x: 118 + row * width, y: 22, width: width - 1, height: 66,
    });
  }
  const at = ((request.ring_start + request.ring_count) % rows + 0.5) * width + 118;
  draw("path", { class: "cursor", d: `M${at} 92 l5 9 h-10 z` });
  draw("text", { x: Math.min(at - 8, 280), y: 114 }, "next row");
  draw("text", { class: "soft", x: 10, y: 138 },
    `${request.ring_count} of ${status.buffer_len} tokens since the last fold` +
    `, folds at ${request.ring_limit}`);
}

function showTimes(times) {
  const shown = ["conventional", "output_only"];
  const most = Math.max(...shown.map((route) => times[route]));
  for (const route of shown) {
    element("ms-" + route).textContent = times[route] ? (times[route] * 1000).toFixed(2) : "–";
    element("bar-" + route).style.width = most ? (100 * times[route]) / most + "%" : "0";
  }
}

async function refresh() {
  try {
    const status = await (await ask("/replayssm/status")).json();
    element("model").textContent = status.model;
    for (const button of element("routes").children) {
      button.setAttribute("aria-checked", String(button.dataset.route === status.route));
    }
    showTimes(status.decode_step_seconds);
    const request = status.running.filter((r) => !r.prefilling).pop();
    if (request) {
      picture(status, request);
      element("caption").textContent =
        `slot ${request.slot}: ${request.tokens} tokens, ${status.running.length} running, ` +
        `${status.waiting} waiting`;
    } else if (!element("picture").childElementCount) {
      element("caption").textContent = "Nothing runs.";
    }
  } catch (error) {
    element("caption").textContent = error.message;
  }
  setTimeout(refresh, controller ? 120 : 1000);
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("prompt").value;
  if (!text || controller) return;
  element("prompt").value = "";
  send(text);
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("form").requestSubmit();
});
element("stop").addEventListener("click", () => controller && controller.abort());
element("routes").addEventListener("click", async (event) => {
  const { route } = event.target.dataset;
  if (!route) return;
  try {
    await ask("/replayssm/route", { method: "POST", body: JSON.stringify({ route }) });
  } catch (error) {
    show("error", error.message);
  }
});
refresh();
