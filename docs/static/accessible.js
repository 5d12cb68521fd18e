// What Sphinx and Furo leave out for screen readers and keyboards: the level of captions, and code and tables that can be scrolled by keys.
addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll('.caption[role="heading"]')) caption.setAttribute("aria-level", "2");
  for (const wide of document.querySelectorAll("pre, .table-wrapper")) wide.tabIndex = 0;
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "Site");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "This page");
});
