// Light or dark, as the system has it unless told otherwise. Runs before the first paint.
(() => {
  const THEMES = ["system", "light", "dark"];
  const SIGNS = { system: "◐", light: "☀", dark: "☾" };
  let theme = localStorage.getItem("radixkv-theme");
  if (!THEMES.includes(theme)) theme = "system";

  function show() {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  function label(button) {
    button.firstChild.data = `${SIGNS[theme]} `;
    button.querySelector("span").textContent = theme;
    button.setAttribute("aria-label", `Theme: ${theme}`);
  }

  show();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    label(button);
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      localStorage.setItem("radixkv-theme", theme);
      show();
      label(button);
      document.dispatchEvent(new Event("themechange"));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      document.dispatchEvent(new Event("themechange"));
    });
  });
})();
