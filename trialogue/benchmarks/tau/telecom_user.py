"""TAU2 telecom, the user's thirty tools for the phone, in the benchmark's order."""

from __future__ import annotations

from typing import Any

from trialogue.benchmarks.tau.phone import APNSettings, NetworkModePreference, TelecomPhone
from trialogue.world.tools import tool

_ADVICE = {
    "Very Poor": "Connection is very slow. Basic web browsing might be difficult.",
    "Poor": "Connection is slow. Web browsing may be sluggish, streaming difficult.",
    "Fair": "Connection is okay for web browsing and some standard definition streaming.",
    "Good": "Connection is good for most activities, including HD streaming.",
    "Excellent": "Connection is very fast.",
}
_SIM = {
    "active": "Your SIM card is active and working.",
    "missing": "No SIM card detected in the phone.",
    "locked_pin": "The SIM card is locked with a PIN code.",
    "locked_puk": "The SIM card is locked with a PUK code.",
}
_MODES = [mode.value for mode in NetworkModePreference]


def _on(value: Any) -> str:
    return "ON" if value else "OFF"


def _yes(value: Any) -> str:
    return "Yes" if value else "No"


def _name_of(value: Any) -> str:
    """The text of a setting. For other values, raise the benchmark's own error."""
    if not isinstance(value, str):
        raise AttributeError(f"'{type(value).__name__}' object has no attribute 'value'")
    return value


def _show_performance(value: str) -> str:
    """The benchmark prints the enumeration member."""
    return f"<PerformanceLevel.{value.upper()}: {value!r}>"


class TelecomUserTools(TelecomPhone):
    @tool
    def check_status_bar(self) -> str:
        """Look at the status bar: signal, mobile data, Wi-Fi and battery."""
        return f"Status Bar: {self._status_bar()}"

    @tool
    def check_network_status(self) -> str:
        """See how the phone is connected: SIM, signal, network, mobile data, roaming and Wi-Fi."""
        device = self._device
        lines = [
            f"Airplane Mode: {_on(device['airplane_mode'])}",
            f"SIM Card Status: {self._sim()}",
            f"Cellular Connection: {device['network_connection_status']}",
            f"Cellular Signal: {device['network_signal_strength']}",
            f"Cellular Network Type: {device['network_technology_connected']}",
            f"Mobile Data Enabled: {_yes(device['data_enabled'])}",
            f"Data Roaming Enabled: {_yes(device['roaming_enabled'])}",
            f"Wi-Fi Radio: {_on(device['wifi_enabled'])}",
            f"Wi-Fi Connected: {_yes(device['wifi_connected'])}",
        ]
        if device["wifi_connected"]:
            lines.append(f"Connected Wi-Fi Network: {device['wifi_ssid']}")
        return "\n".join(lines)

    @tool
    def check_network_mode_preference(self) -> str:
        """See which kind of network the phone prefers."""
        return f"Network Mode Preference: {_name_of(self._device['network_mode_preference'])}"

    @tool(writes=True)
    def set_network_mode_preference(self, mode: NetworkModePreference | str) -> str:
        """Choose which kind of network the phone prefers; it then looks for one."""
        given: Any = mode
        if isinstance(given, str) and given not in _MODES:
            return self._and_status(
                f"Failed to set network mode: '{mode}' is not a valid option. "
                f"Please use one of: {', '.join(_MODES)}"
            )
        self._change()["network_mode_preference"] = mode
        self.simulate_network_search()
        return self._and_status(f"Preferred Network Mode set to: {_name_of(mode)}")

    @tool
    def run_speed_test(self) -> str:
        """Measure how fast the mobile internet connection is."""
        speed, grade = self._speed()
        if speed is None:
            return f"Speed test failed: {grade}."
        return f"Speed Test Result: {speed:.2f} Mbps ({grade}). {_ADVICE[grade]}"

    @tool(writes=True)
    def toggle_airplane_mode(self) -> str:
        """Turn airplane mode on or off."""
        return self._and_status(f"Airplane Mode is now {_on(self._toggle_airplane_mode())}.")

    @tool
    def check_sim_status(self) -> str:
        """See whether the SIM card works, is missing or is locked."""
        return _SIM[self._sim()]

    @tool(writes=True)
    def reseat_sim_card(self) -> str:
        """Take the SIM card out and put it back in."""
        self._change()["sim_card_missing"] = False
        self.simulate_network_search()
        if self._sim() == "missing":
            raise AssertionError
        return self._and_status("SIM card re-seated successfully.")

    @tool(writes=True)
    def toggle_data(self) -> str:
        """Turn mobile data on or off."""
        return self._and_status(f"Mobile Data is now {_on(self._toggle_data())}.")

    @tool(writes=True)
    def toggle_roaming(self) -> str:
        """Turn data roaming on or off."""
        return self._and_status(f"Data Roaming is now {_on(self._toggle_roaming())}.")

    @tool
    def check_data_restriction_status(self) -> str:
        """See whether anything on the phone limits data, such as data saver mode."""
        if self._device["data_saver_mode"]:
            return "Data Saver mode is ON (limits data usage)."
        return "Data Saver mode is OFF."

    @tool(writes=True)
    def toggle_data_saver_mode(self) -> str:
        """Turn data saver mode on or off."""
        return self._and_status(f"Data Saver Mode is now {_on(self._flip('data_saver_mode'))}.")

    @tool
    def check_apn_settings(self) -> str:
        """See the access point settings for mobile data and picture messages."""
        settings = self._device["active_apn_settings"]
        return (
            f"Current APN Name: {settings['apn_name'] or 'Not Set'}\n"
            f"MMSC URL (for picture messages): {settings['mmsc_url'] or 'Not Set'}\n"
            "(These are technical settings, usually best left unchanged.)"
        )

    @tool(writes=True)
    def set_apn_settings(self, apn_settings: APNSettings | dict[str, Any]) -> str:
        """Enter access point settings."""
        if not isinstance(apn_settings, dict):
            self._change()["active_apn_settings"] = apn_settings
            raise AttributeError(f"'{type(apn_settings).__name__}' object has no attribute 'apn_name'")
        settings = APNSettings(**apn_settings).model_dump(mode="json")
        self._change()["active_apn_settings"] = settings
        self.simulate_network_search()
        return self._and_status(f"APN settings set to: {settings['apn_name']}")

    @tool(writes=True)
    def reset_apn_settings(self) -> str:
        """Have the access point settings reset at the next restart."""
        self._change()["active_apn_settings"]["reset_at_reboot"] = True
        self.simulate_network_search()
        return self._and_status("APN settings will reset at reboot.")

    @tool
    def check_wifi_status(self) -> str:
        """See whether Wi-Fi is on and connected."""
        device = self._device
        if not device["wifi_enabled"]:
            return "Wi-Fi is turned OFF."
        if not device["wifi_connected"]:
            return "Wi-Fi is ON but not connected to any network."
        strength = device["wifi_signal_strength"]
        return f"Wi-Fi is ON and connected to '{device['wifi_ssid']}'. Signal strength: {strength}."

    @tool(writes=True)
    def toggle_wifi(self) -> str:
        """Turn Wi-Fi on or off."""
        if self._device["airplane_mode"]:
            return self._and_status("Cannot change Wi-Fi settings while Airplane Mode is ON.")
        is_on = self._flip("wifi_enabled")
        if not is_on:
            self._drop_wifi()
        return self._and_status(f"Wi-Fi is now {_on(is_on)}.")

    @tool
    def check_wifi_calling_status(self) -> str:
        """See whether calls may go over Wi-Fi."""
        return f"Wi-Fi Calling is currently turned {_on(self._device['wifi_calling_enabled'])}."

    @tool(writes=True)
    def toggle_wifi_calling(self) -> str:
        """Turn calling over Wi-Fi on or off."""
        return self._and_status(f"Wi-Fi Calling is now {_on(self._flip('wifi_calling_enabled'))}.")

    @tool
    def check_vpn_status(self) -> str:
        """See whether a VPN is connected."""
        device = self._device
        if device["vpn_connected"]:
            details = device["vpn_details"]
            if not details:
                return "VPN is ON and connected (no specific details available)."
            shown = ", ".join(
                f"{name!r}: {_show_performance(value) if name == 'server_performance' else repr(value)}"
                for name, value in details.items()
            )
            return f"VPN is ON and connected. Details: {{{shown}}}"
        if device["vpn_enabled_setting"]:
            return "VPN is turned ON in settings, but currently not connected."
        return "VPN is turned OFF."

    @tool(writes=True)
    def connect_vpn(self) -> str:
        """Connect to the VPN."""
        if not self._connect_vpn():
            return "VPN already connected."
        return self._and_status("VPN connected successfully.")

    @tool(writes=True)
    def disconnect_vpn(self) -> str:
        """Disconnect from the VPN."""
        if not self._disconnect_vpn():
            return self._and_status("No active VPN connection to disconnect.")
        return self._and_status("VPN disconnected successfully.")

    @tool
    def check_installed_apps(self) -> str:
        """List the apps on the phone."""
        return f"The following apps are installed on the phone: {', '.join(self._device['app_statuses'])}"

    @tool
    def check_app_status(self, app_name: str) -> str:
        """See how an app is set up."""
        app = self._device["app_statuses"].get(app_name)
        if app is None:
            return f"App '{app_name}' not found on this phone."
        granted = self._granted(app)
        lines = [f"Status for App: {app_name}"]
        if granted:
            lines += [" - Permissions Granted:", *(f"   - {name}" for name in granted)]
        else:
            lines.append(" - Permissions: None granted.")
        return "\n".join(lines)

    @tool
    def check_app_permissions(self, app_name: str) -> str:
        """See what an app is allowed to use."""
        app = self._device["app_statuses"].get(app_name)
        if app is None:
            return f"App '{app_name}' not found on this phone."
        granted = self._granted(app)
        if not granted:
            return f"App '{app_name}' currently has no permissions granted."
        return f"App '{app_name}' has permission for: {', '.join(granted)}."

    @tool(writes=True)
    def grant_app_permission(self, app_name: str, permission: str) -> str:
        """Allow an app to use something.

        Args:
            app_name: Name of the app.
            permission: What it may use, in lower case.
        """
        permission = permission.lower()
        app = self._device["app_statuses"].get(app_name)
        if app is None:
            return self._and_status(f"Error. App '{app_name}' not found. Cannot grant permission.")
        if permission not in app["permissions"]:
            known = list(app["permissions"])
            return self._and_status(
                f"Error. Permission '{permission}' not tracked for app '{app_name}', "
                f"available permissions: {known}"
            )
        self._change()["app_statuses"][app_name]["permissions"][permission] = True
        return self._and_status(f"Success. Permission '{permission}' granted to app '{app_name}'.")

    @tool
    def can_send_mms(self) -> str:
        """Try whether picture messages can be sent."""
        word = "can" if self._can_send_mms() else "cannot"
        return f"Your messaging app {word} send MMS messages."

    @tool(writes=True)
    def reboot_device(self) -> str:
        """Restart the phone."""
        device = self._change()
        lines: list[str] = []
        if device["active_apn_settings"]["reset_at_reboot"]:
            lines.append("Resetting APN settings...")
            device["active_apn_settings"] = APNSettings().model_dump(mode="json")
        lines.append("Restarting network services...")
        self.simulate_network_search()
        return self._and_status("\n".join(lines))

    @tool
    def check_payment_request(self) -> str:
        """See whether the agent has asked for a payment."""
        request = self._around["payment_request"]
        if request is None:
            return "No payment request has been made."
        return f"You have a payment request for bill {request['bill_id']} of {request['amount_due']} USD."

    @tool(writes=True)
    def make_payment(self) -> str:
        """Pay what the agent has asked for."""
        if self._around["payment_request"] is None:
            return "You do not have a payment request."
        request = self.touch("", "surroundings")["payment_request"]
        request["paid"] = True
        return f"Payment of {request['amount_due']} USD has been made for bill {request['bill_id']}."
