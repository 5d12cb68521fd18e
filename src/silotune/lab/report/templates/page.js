"use strict";
// Values under the pointer: every diagram has its values in data-marks, as [x %, y %, text].
const tip = document.getElementById("tip"), dot = document.createElement("div"), REACH = 26;
dot.className = "dot";
function hide() { tip.hidden = true; dot.remove(); }
function nearest(svg, x, y) {
  const box = svg.getBoundingClientRect();
  svg.marks ??= JSON.parse(svg.dataset.marks);
  let best = null, distance = REACH;
  for (const [left, top, text] of svg.marks) {
    const away = Math.hypot(box.left + left * box.width / 100 - x, box.top + top * box.height / 100 - y);
    if (away < distance) [best, distance] = [{left, top, text}, away];
  }
  return best;
}
document.addEventListener("pointermove", event => {
  const svg = event.target.closest?.(".panel svg");
  const found = svg && nearest(svg, event.clientX, event.clientY);
  if (!found) return hide();
  tip.textContent = found.text;
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 6);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 12)}px`;
  dot.style.left = `${found.left}%`;
  dot.style.top = `${found.top}%`;
  svg.parentElement.append(dot);
});
document.addEventListener("scroll", hide, {passive: true});

// A method's name in a legend hides and shows what is drawn of it.
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!shown));
    for (const drawn of button.closest("figure").querySelectorAll(`[id*="-row${button.dataset.row}-"]`))
      drawn.style.display = shown ? "none" : "";
  });
}

// The reader chooses a silo: rows and diagrams of others go.
const choice = document.getElementById("silo");
function show() {
  for (const part of document.querySelectorAll("[data-silo]"))
    part.hidden = choice.value !== "" && part.dataset.silo !== choice.value;
}
if (choice) {
  choice.closest("p").hidden = false;
  choice.addEventListener("change", show);
  show();
}
if (window.matchMedia("(max-width: 999px)").matches) document.querySelector("nav details").removeAttribute("open");
